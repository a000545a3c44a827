"""60 classes and 20 variants in an API server without kubelets: function, webhook and policy decide alike."""

import json
import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from admitting import POLICIES, bare_cluster, client, configuration, rendered_policy, save, webhook, why
from machines import ROOT
from many_classes import HOST, NAME, POOL, RANK, catalog, node, nodes, pod
from random_pods import RandomPods
from scheduling import patched

from imagematrix.integrations.kubernetes.admission.admission import admit, make_policy
from imagematrix.integrations.kubernetes.nodes.classes import classify_nodes
from imagematrix.integrations.kubernetes.nodes.labels import CLASS
from imagematrix.integrations.kubernetes.nodes.nodes import parse_nodes

pytestmark = pytest.mark.since("1.36")

OTHER = "reg.test/other:v1"
PODS = 200
CHOOSER = 8444  # a port


@pytest.fixture(scope="module")
def cluster(data, release):
    """A cluster of Node objects that no kubelet serves."""
    with bare_cluster(data, release) as started:
        yield started


@pytest.fixture(scope="module")
def folder(cluster, tmp_path_factory):
    """A folder with catalog.json and the cluster's nodes.json."""
    return save(cluster, tmp_path_factory.mktemp("alike"))


@pytest.fixture(scope="module")
def known(folder):
    """The policy as the Python function takes it."""
    listed = parse_nodes(json.loads((folder / "nodes.json").read_text()), "nodes.json")
    return make_policy(NAME, classify_nodes(listed, catalog()), deny=True)


@pytest.fixture(scope="module")
def rendered(cluster, folder):
    """The objects that `render policy --on-unknown deny` writes."""
    return rendered_policy(cluster, folder, "deny")


@pytest.fixture
def hook(cluster, folder):
    """Return a context manager with our webhook configured; `runs` says whether it also runs."""
    return partial(webhook, cluster, folder)


@pytest.fixture
def enforced(cluster):
    """Return a context manager with these policies in force."""

    @contextmanager
    def within(objects):
        before = tried(cluster, [decided()])
        cluster.apply(*objects)
        try:
            cluster.wait(lambda: tried(cluster, [decided()]) != before)
            yield
        finally:
            cluster.kubectl("delete", ",".join(POLICIES), "--all")
            cluster.wait(lambda: tried(cluster, [decided()]) == before)

    return within


def decided():
    """Return a pod that gets an image."""
    return pod("decided", NAME, nodeSelector={POOL: "0-8.0"})


def tried(cluster, pods):
    """Return the images and the affinity with which pods would be created, or why they are refused."""
    given = json.dumps({"apiVersion": "v1", "kind": "List", "items": pods})
    words = ("create", "-f", "-", "--dry-run=server", "-o", "json")
    done = cluster.kubectl(*words, input=given, check=False)
    errors = iter([line for line in done.stderr.splitlines() if line.startswith(("Error", "The "))])
    found, text = {}, done.stdout.lstrip()
    while text:
        made, end = json.JSONDecoder().raw_decode(text)
        found[made["metadata"]["name"]] = made
        text = text[end:].lstrip()
    names = [one["metadata"]["name"] for one in pods]
    outcomes = [shown(found[name]) if name in found else refusal(next(errors)) for name in names]
    assert not [*errors], done.stderr
    return outcomes


def refusal(line):
    """Return the reason in the line in which kubectl reports that a pod is refused."""
    return line.partition("denied request: ")[2] or line.partition("denied the request: ")[2] or line


def answered(cluster):
    """Whether the webhook decides; it is asked before a validating policy."""
    told = why(cluster, pod("undecided", NAME))
    return "admission webhook" in told and "denied the request" in told


def shown(made):
    spec = made["spec"]
    lists = (spec.get("initContainers", []), spec["containers"])
    return [one["image"] for some in lists for one in some], without_empty(spec.get("affinity"))


def without_empty(value):
    """Return a document without empty lists, which API servers leave out."""
    if isinstance(value, dict):
        return {key: without_empty(one) for key, one in value.items() if one != []}
    return [without_empty(one) for one in value] if isinstance(value, list) else value


def image(cluster, given):
    """Return the first image that a pod would get; empty if it is refused."""
    (outcome,) = tried(cluster, [given])
    return "" if isinstance(outcome, str) else outcome[0][0]


def expected(given, known):
    """Return what the Python function makes of a pod."""
    admission = admit(given, known)
    return admission.reason if admission.refused else shown(patched(given, admission.patch))


def test_each_of_60_classes_gets_the_image_of_its_variant(cluster, enforced, known, rendered):
    names = [each.name for each in known.classes]
    assert (len(names), len({each.image for each in known.classes if each.image})) == (60, 20)
    pods = [pod(f"p{number}", NAME, nodeSelector={CLASS: name}) for number, name in enumerate(names)]
    with enforced(rendered):
        outcomes = tried(cluster, pods)
    for each, outcome in zip(known.classes, outcomes, strict=True):
        if each.image:
            assert outcome[0] == [each.image]
        else:
            assert outcome == f"{NAME}: no image fits the nodes that the pod may run on: {each.name}"


def test_function_webhook_and_policy_decide_alike(cluster, enforced, hook, known, rendered):
    images = (NAME, NAME, NAME, OTHER, f"{NAME}-1@sha256:{1:064x}")
    making = RandomPods(29, list(nodes()), images, [POOL, POOL, RANK, HOST, CLASS, "unknown"], RANK)
    pool = {"nodeSelector": {POOL: "0-8.0"}}
    pods = [making.make(f"p{number}") for number in range(PODS)]
    pods += [pod("wide", *[NAME] * 41, **pool), pod("limit", *[NAME] * 40, **pool)]
    plain = tried(cluster, pods)
    assert plain == [shown(given) for given in pods], "without a policy, every pod is accepted as it is"
    wanted = [expected(given, known) for given in pods]
    with enforced(rendered):
        by_policy = tried(cluster, pods)
        again = tried(cluster, [changed(*pair) for pair in zip(pods, by_policy, strict=True)])
    with hook("deny"):
        cluster.wait(lambda: answered(cluster))
        by_webhook = tried(cluster, pods)
    with enforced(rendered), hook("deny"):
        cluster.wait(lambda: answered(cluster))
        by_both = tried(cluster, pods)
    assert by_policy == wanted
    assert by_webhook == wanted
    assert by_both == wanted
    assert again == by_policy
    kinds = Counter(
        "refused" if isinstance(now, str) else "changed" if now != before else "left"
        for now, before in zip(by_policy, plain, strict=True)
    )
    assert min(kinds["refused"], kinds["changed"], kinds["left"]) >= 20, kinds


def changed(given, outcome):
    """Return a pod as the API server has changed it; a pod that it refuses, as it was."""
    if isinstance(outcome, str):
        return given
    made = json.loads(json.dumps(given))
    images = iter(outcome[0])
    for one in [*made["spec"].get("initContainers", []), *made["spec"]["containers"]]:
        one["image"] = next(images)
    if outcome[1] is not None:
        made["spec"]["affinity"] = outcome[1]
    return made


def test_a_pod_is_decided_again_after_a_later_webhook(cluster, enforced, hook, rendered):
    chosen = pod("chosen", NAME, annotations={"choose": json.dumps({POOL: "0-8.0"})})
    mutating = [one for one in rendered if one["kind"].startswith("Mutating")]
    never = json.loads(json.dumps(mutating))
    never[0]["spec"]["reinvocationPolicy"] = "Never"
    with enforced(never), chooser(cluster):
        assert image(cluster, chosen) == NAME
    with enforced(rendered), chooser(cluster):
        by_policy = image(cluster, chosen)
    with hook("default"), chooser(cluster):
        cluster.wait(lambda: image(cluster, decided()) != NAME)
        by_webhook = image(cluster, chosen)
    # The webhook refuses before others have been asked, the validating policy after that.
    with hook("deny"), chooser(cluster):
        cluster.wait(lambda: answered(cluster))
        assert "need different images" in why(cluster, chosen)
    assert by_policy == by_webhook != NAME


@contextmanager
def chooser(cluster):
    """Run somebody else's webhook, after ours."""
    program = Path(ROOT / "tests/doubles/node_selector.py")
    cluster.control.start(
        "chooser", sys.executable, program, CHOOSER, cluster.control.authority, cluster.control.key
    )
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    one = {
        "name": "chooser.reg.test",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "matchConditions": [
            {"name": "asks", "expression": "'choose' in object.metadata.?annotations.orValue({})"}
        ],
        "rules": [rule],
        "clientConfig": client(cluster, CHOOSER, "/"),
    }
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration"}
    chosen = pod("any", OTHER, annotations={"choose": json.dumps({POOL: "x"})})
    asking = json.dumps(chosen)
    words = ("create", "-f", "-", "--dry-run=server", "-o", "jsonpath={.spec.nodeSelector.pool}")
    with configuration(cluster, {**kind, "metadata": {"name": "z-chooser"}, "webhooks": [one]}):
        try:
            cluster.wait(lambda: cluster.kubectl(*words, input=asking, check=False).stdout == "x")
            yield
        finally:
            cluster.control.stop("chooser")


def test_a_webhook_that_does_not_answer_beside_the_policy(cluster, enforced, hook, rendered):
    undecided, mutating = pod("undecided", NAME), rendered[:2]
    assert [one["kind"] for one in mutating] == ["MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"]
    failed = "failed calling webhook"
    with hook("deny", runs=False):
        cluster.wait(lambda: failed in why(cluster, undecided))
        assert failed in why(cluster, decided())
        with enforced(mutating):
            # The policy comes first, and what it has changed is not sent to the webhook.
            assert image(cluster, decided()).startswith(f"{NAME}-")
            assert failed in why(cluster, undecided)
    with hook("default", runs=False):
        opened = cluster.control.log("apiserver").count("failing open")
        cluster.wait(
            lambda: (
                image(cluster, undecided) == image(cluster, decided()) == NAME
                and cluster.control.log("apiserver").count("failing open") > opened
            )
        )
        with enforced(mutating):
            assert image(cluster, decided()).startswith(f"{NAME}-")


def test_the_failure_policy_decides_when_an_expression_fails(cluster, enforced, rendered):
    broken = json.loads(json.dumps(rendered[:2]))
    (names,) = (one for one in broken[0]["spec"]["variables"] if one["name"] == "names")
    names["expression"] = "[object.spec.nodeSelector.unknown]"
    with enforced(broken):
        assert "no such key: unknown" in why(cluster, decided())
        broken[0]["spec"]["failurePolicy"] = "Ignore"
        cluster.apply(*broken)
        cluster.wait(lambda: image(cluster, decided()) == NAME)


def test_a_node_with_1500_labels_of_its_own_ends_no_policy(cluster, enforced, tmp_path):
    """`kubectl apply` keeps what it has applied in an annotation, which has a limit too."""
    lone = node(99, "lone", "550.163.01", "9.0", "x86-64-v4")
    lone["metadata"]["labels"] |= {f"example.com/a-label-of-its-own-{number}": "x" for number in range(1500)}
    cluster.apply(lone)
    try:
        made = rendered_policy(cluster, save(cluster, tmp_path), "deny")
        with enforced(made):
            assert image(cluster, decided()).startswith(f"{NAME}-")
            assert image(cluster, pod("lone", NAME, nodeSelector={POOL: "lone"})).startswith(f"{NAME}-")
            assert "need different images" in why(cluster, pod("undecided", NAME))
    finally:
        cluster.kubectl("delete", "node", "n99")
