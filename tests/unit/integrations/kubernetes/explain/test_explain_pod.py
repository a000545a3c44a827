"""Why a pod got no image or cannot be placed: the words, and that they agree with admission and scheduler."""

import io
import json
import re
from typing import Any

import pytest
from admission_cases import DECIDED, REQUIRED, asking, pod, term
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import matches

from imagematrix.common import json_documents
from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.admission.cluster_policy import make_cluster_policy
from imagematrix.integrations.kubernetes.explain import obstacles
from imagematrix.integrations.kubernetes.explain.explain_pod import explain_pod
from imagematrix.integrations.kubernetes.explain.obstacles import KnownNodes, find_obstacles
from imagematrix.integrations.kubernetes.explain.pod import parse_pod
from imagematrix.integrations.kubernetes.nodes.labels import CLASS
from imagematrix.integrations.kubernetes.nodes.nodes import parse_nodes

NAME = "reg.x/t:v1"
OLD, NEW = f"{NAME}-old@sha256:{'a' * 64}", f"{NAME}-new@sha256:{'b' * 64}"
GPU, NVIDIA = "imagematrix.io/gpu", "nvidia.com/gpu"
TAINT = {"key": NVIDIA, "value": "present", "effect": "NoSchedule"}


@pytest.fixture
def catalog(make):
    variants = [
        make.variant(OLD.partition("@")[0], digest=f"sha256:{'a' * 64}"),
        make.variant(
            NEW.partition("@")[0], digest=f"sha256:{'b' * 64}", driver=make.umd("exact", "580.65.06")
        ),
    ]
    return replace(make.catalog(*variants), image="reg.x/t")


class Items:
    """Node objects: two with the old driver, one with the new one, one without GPUs."""

    def __init__(self, cluster, make):
        hosts = {
            "a": make.host(make.gpu(0)),
            "b": make.host(make.gpu(0)),
            "c": make.host(make.gpu(0), driver="580.65.06"),
            "cpu": make.host(),
        }
        self.by_name: dict[str, Any] = {}
        for name, host in hosts.items():
            pool = {"pool": "big" if name in "ac" else "small"}
            made = cluster.node(name, cluster.own(host) | pool)
            made["spec"] = {}
            made["status"]["allocatable"] = {GPU: "2", "cpu": "8"} if host.gpus else {"cpu": "8"}
            self.by_name[name] = made

    def __getitem__(self, name):
        return self.by_name[name]

    def class_of(self, name):
        return self[name]["metadata"]["labels"][CLASS]

    @property
    def document(self):
        return {"kind": "List", "items": list(self.by_name.values())}


@pytest.fixture
def items(cluster, make):
    return Items(cluster, make)


@pytest.fixture
def ask(items, catalog):
    """Return a function that explains a pod."""

    def call(given, used=None, name=None):
        nodes = parse_nodes(items.document, "nodes")
        policy = make_cluster_policy(nodes, catalog, name=name)
        explained = explain_pod(parse_pod(given, "pod"), [policy], KnownNodes(nodes, used or {}))
        return explained[0] if explained else None

    return call


def using(image=NAME, resource=None, **spec):
    made = pod(image, **spec)
    if resource:
        made["spec"]["containers"][0]["resources"] = {"limits": {resource: "2"}}
    return made


def placed(items, node, image, resource=None, **spec):
    """Return a pod that got an image and the affinity to the class of a node."""
    return using(image, resource, affinity=asking(term(CLASS, "In", items.class_of(node))), **spec)


def verdict(explanation, name):
    (found,) = [each for each in explanation.classes if name in each.nodes]
    return found


def test_a_pod_without_a_decision_has_the_words_of_admission(ask):
    for given_pod, cause in (
        (using(), "ImageUndecided"),
        (using(nodeSelector={"pool": "none"}), "NoClassMatches"),
        (using(nodeSelector={"imagematrix.io/gpu.count": "0"}), "NoImageFits"),
        (pod(*[NAME] * 41), "ImageUndecided"),
    ):
        explained = ask(given_pod)
        assert explained.cause == cause
        assert explained.summary.startswith(f"{NAME}: ")


@pytest.mark.parametrize(
    ("spec", "cause", "words"),
    [
        ({"affinity": asking(*[term("pool", "In", "x")] * 16_000)}, "ImageUndecided", "node selector terms"),
        ({"nodeSelector": {f"a{number}": "b" for number in range(41)}}, None, "more than 40 labels"),
        ({"tolerations": [{"operator": "Exists"}] * 41}, None, "or tolerations"),
    ],
)
def test_a_pod_that_is_too_wide_is_compared_with_no_node(ask, monkeypatch, spec, cause, words):
    """It would keep the Events of all others waiting for minutes."""
    monkeypatch.setattr(obstacles, "find_obstacles", lambda *_: pytest.fail("it was compared"))
    explained = ask(using(**spec))
    assert (explained.cause, explained.classes, explained.fix) == (cause, (), None)
    assert words in explained.summary
    assert ask(using(OLD, **spec)).cause is None


def test_no_image_fits_with_the_rule_and_the_remedy(ask):
    explained = ask(using(nodeSelector={"imagematrix.io/gpu.count": "0"}))
    assert "no image fits the nodes that the pod may run on: cpu-" in explained.summary
    assert "the image needs a GPU, and none is passed" in explained.summary
    assert explained.fix == verdict(explained, "cpu").fix is not None
    assert verdict(explained, "cpu").selected is None
    assert verdict(explained, "a").selected == OLD


def test_a_pod_that_was_never_decided_is_to_be_created_again(ask):
    explained = ask(using(nodeSelector={"pool": "big", "imagematrix.io/driver": "550.163.01"}))
    assert explained.cause == "NotAdmitted"
    assert explained.summary.endswith(f"a new one would get {OLD}")
    assert "create it again" in explained.fix
    assert "the webhook is not asked in kube-system" in explained.fix, (
        "nor is a new pod's image decided there"
    )


def test_a_pod_for_a_class_that_no_longer_exists_is_to_be_created_again(ask, items):
    given_pod = placed(items, "c", NEW)
    assert ask(given_pod).cause is None
    del items.by_name["c"]
    explained = ask(given_pod)
    assert explained.cause == "ImageOutdated"
    assert "create it again" in explained.fix


def test_nothing_is_wrong_with_a_pod_that_a_node_can_take(ask, items):
    explained = ask(placed(items, "a", OLD, GPU))
    count = f"{items.class_of('a')} (2 of 2 nodes)"
    assert (explained.cause, explained.fix) == (None, None)
    assert explained.summary == f"{OLD}: nothing keeps the pod from nodes of {count}"
    claiming = ask(placed(items, "a", OLD, resourceClaims=[{"name": "gpu"}]))
    assert claiming.summary.endswith(f"{count}, and its resource claims were not looked at")
    on_node = ask(placed(items, "a", OLD, nodeName="a"))
    assert (on_node.cause, on_node.summary) == (None, f"the pod has {OLD}, which fits its node a")


def test_an_empty_class_is_a_class_that_no_node_has(ask, items):
    """Admission refuses a new pod like this one, so that to create it again would not help."""
    del items.by_name["c"]
    explained = ask(using(labels={CLASS: ""}, nodeSelector={"imagematrix.io/gpu.count": "1"}))
    assert explained.cause == "NoClassMatches"
    assert verdict(explained, "a").able == 0


def test_images_of_two_catalogs_are_decided_together(items, catalog, make):
    """One fits only some nodes, which decides the other, whichever catalog comes first."""
    lone = make.variant("reg.x/s:v1-new", digest=f"sha256:{'c' * 64}", driver=make.umd("exact", "580.65.06"))
    nodes = parse_nodes(items.document, "nodes")
    first, second = (
        make_cluster_policy(nodes, each) for each in (catalog, replace(make.catalog(lone), image="reg.x/s"))
    )
    for clusters in ((first, second), (second, first)):
        explained = explain_pod(parse_pod(pod(NAME, "reg.x/s:v1"), "pod"), clusters, KnownNodes(nodes, {}))
        told = {each.image: (each.cause, each.summary) for each in explained}
        assert {cause for cause, _ in told.values()} == {"NotAdmitted"}
        assert told[NAME][1].endswith(f"a new one would get {NEW}")


@pytest.mark.parametrize("nodes", [4, 40])
def test_nodes_that_a_pod_cannot_tell_apart_are_compared_with_it_once(
    cluster, make, catalog, monkeypatch, nodes
):
    """Each pod of a DaemonSet differs, and there are as many as nodes."""
    host = make.host(make.gpu(0))
    listed = [
        cluster.node(f"n{number}", cluster.own(host) | {"kubernetes.io/hostname": f"n{number}"})
        for number in range(nodes)
    ]
    parsed = parse_nodes({"kind": "List", "items": listed}, "nodes")
    clusters, known = [make_cluster_policy(parsed, catalog)], KnownNodes(parsed, {})
    compared = []
    monkeypatch.setattr(
        obstacles,
        "find_obstacles",
        lambda pod, node, used: compared.append(node) or find_obstacles(pod, node, used),
    )
    for number in range(nodes):
        named = {"matchFields": term("metadata.name", "In", f"n{number}", kind="matchFields")["matchFields"]}
        given = using(OLD, affinity=asking(term(CLASS, "In", parsed[0].class_name) | named))
        (explained,) = explain_pod(parse_pod(given, "pod"), clusters, known)
        (found,) = explained.classes
        assert (found.able, [each.nodes for each in found.obstacles]) == (1, [nodes - 1])
    assert len(compared) == 2 * nodes
    on_node = parse_pod(using(OLD, nodeName="n1"), "pod")
    assert [each.cause for each in explain_pod(on_node, clusters, known, in_detail=False)] == [None]
    assert len(compared) == 2 * nodes, "it has its image on its node"


def test_a_pod_that_has_ended_has_no_problem(ask):
    ended = using() | {"status": {"phase": "Failed"}}
    assert (ask(ended).cause, ask(ended).summary) == (None, "the pod has ended")


def test_taints_and_cordons_are_obstacles_unless_tolerated(ask, items):
    for name in "ab":
        items[name]["spec"] = {"taints": [TAINT, {"key": "x", "effect": "PreferNoSchedule"}]}
    explained = ask(placed(items, "a", OLD))
    assert explained.cause == "NoNodeFits"
    why = "the pod does not tolerate the taint nvidia.com/gpu=present:NoSchedule"
    assert explained.summary == f"{OLD}: no node can run the pod: {items.class_of('a')}: {why}"
    assert "add a toleration of nvidia.com/gpu" in explained.fix
    (both,) = verdict(explained, "a").obstacles
    assert (both.nodes, both.why) == (2, why)
    for toleration in (
        {"operator": "Exists"},
        {"key": NVIDIA, "operator": "Exists"},
        {"key": NVIDIA, "value": "present", "effect": "NoSchedule"},
        {"key": NVIDIA, "operator": "Later", "value": "1"},
    ):
        assert ask(placed(items, "a", OLD, tolerations=[toleration])).cause is None, toleration
    for toleration in (
        {"key": NVIDIA},
        {"key": NVIDIA, "value": "present", "effect": "NoExecute"},
        {"key": "other", "operator": "Exists"},
        {"value": "present"},
    ):
        assert ask(placed(items, "a", OLD, tolerations=[toleration])).cause == "NoNodeFits", toleration
    cordon = {
        "unschedulable": True,
        "taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}],
    }
    for name in "ab":
        items[name]["spec"] = cordon
    (one,) = verdict(ask(placed(items, "a", OLD)), "a").obstacles
    assert (one.why, "kubectl uncordon" in one.fix) == ("the node is cordoned", True)
    assert ask(placed(items, "a", OLD, tolerations=[{"operator": "Exists"}])).cause is None


def test_gpus_are_counted(ask, items):
    explained = ask(placed(items, "a", OLD, NVIDIA))
    assert explained.cause == "NoNodeFits"
    assert explained.summary.endswith("the pod requests 2 nvidia.com/gpu; found 2 imagematrix.io/gpu")
    assert explained.fix == f"request {GPU}"
    assert ask(placed(items, "a", OLD, GPU), {"a": {GPU: 1}}).cause is None, "b has two"
    busy = ask(placed(items, "a", OLD, GPU), {"a": {GPU: 1}, "b": {GPU: 3}})
    assert busy.summary.endswith("the pod requests 2 imagematrix.io/gpu; found 0 of 2 free, 1 of 2 free")
    assert busy.fix == "wait until other pods end"
    for name in "ab":
        items[name]["status"]["allocatable"][GPU] = "1"
    small = ask(placed(items, "a", OLD, GPU))
    assert small.summary.endswith("the pod requests 2 imagematrix.io/gpu; found 1")
    for name in "ab":
        del items[name]["status"]["allocatable"]
    assert ask(placed(items, "a", OLD, GPU)).summary.endswith("2 imagematrix.io/gpu; found none")


def test_labels_that_a_pod_asks_for_are_named_with_those_of_the_nodes(ask, items):
    explained = ask(placed(items, "a", OLD, nodeSelector={"pool": "none", "zone": "x"}))
    whys = {each.why: each.nodes for each in verdict(explained, "a").obstacles}
    assert whys == {
        "the node selector asks for pool=none; found pool=big, pool=small": 2,
        "the node selector asks for zone=x; found no zone": 2,
    }
    two = asking(term("pool", "In", "x", "y"), term("zone", "Exists"), {})
    explained = ask(using(OLD, affinity=two))
    (one,) = verdict(explained, "a").obstacles
    wanted = "pool In x, y, or zone Exists, or an empty term, which no node meets"
    assert one.why == f"the node affinity asks for {wanted}"
    (one,) = verdict(ask(using(OLD, affinity=asking())), "a").obstacles
    assert one.why == "the node affinity asks for nothing, which no node meets"
    (one,) = verdict(ask(using(OLD, affinity=asking(term("pool", "Gt", "1")))), "a").obstacles
    assert one.why == "the node affinity asks for pool Gt 1; found pool=big, pool=small"
    named = verdict(ask(using(OLD, nodeName="b")), "a")
    assert (named.able, [each.why for each in named.obstacles]) == (1, ["the pod names the node b"])
    labelled = verdict(ask(using(labels={CLASS: "x"})), "a")
    assert labelled.obstacles[0].why.startswith(f"the pod's label {CLASS} is x; found {CLASS}=l40s")


def test_nodes_without_a_matching_class_label_are_left_out(ask, items):
    del items["a"]["metadata"]["labels"][CLASS]
    items["b"]["metadata"]["labels"][CLASS] = "other"
    explained = ask(using(nodeSelector={"pool": "none"}))
    assert explained.cause == "NoClassMatches"
    assert explained.left_out == ("a", "b")
    assert "label them again" in explained.fix


def test_a_pod_is_recognized_by_every_name_of_its_image(ask, items):
    for image in (OLD, OLD.partition("@")[0], f"reg.x/t@sha256:{'a' * 64}"):
        assert ask(placed(items, "a", image)) is not None
    assert ask(using("debian")) is None
    assert ask(using("team/t:v1")) is None
    assert ask(using("team/t:v1"), name="team/t:v1").cause == "ImageUndecided"


def scheduled(given_pod, name, labels):
    """Whether a scheduler's rules on labels and names let a pod run on a node."""
    spec = given_pod["spec"]
    terms = spec.get("affinity", {}).get("nodeAffinity", {}).get(REQUIRED, {}).get("nodeSelectorTerms")
    asked = [
        (one.get("matchExpressions", []), one.get("matchFields", []))
        for one in terms or ()
        if one.get("matchExpressions") or one.get("matchFields")
    ]
    return (
        spec.get("nodeSelector", {}).items() <= labels.items()
        and spec.get("nodeName") in {None, "", name}
        and given_pod["metadata"].get("labels", {}).get(CLASS, labels[CLASS]) == labels[CLASS]
        and (
            terms is None
            or any(
                all(matches(each, labels) for each in expressions)
                and all(matches(each, {"metadata.name": name}) for each in fields)
                for expressions, fields in asked
            )
        )
    )


@pytest.mark.parametrize("spec", [spec for spec, _ in DECIDED if "Later" not in str(spec)])
def test_a_node_without_an_obstacle_is_one_that_the_scheduler_admits(spec, items):
    given_pod = using(**spec)
    for name, item in items.by_name.items():
        item["metadata"]["labels"] |= {"zone": "x" if name == "a" else "y", "memory": "141"}
    for node in parse_nodes(items.document, "nodes"):
        found = find_obstacles(parse_pod(given_pod, "pod"), node, {})
        assert (not found) == scheduled(given_pod, node.name, node.labels), found


def test_an_operator_that_is_not_known_is_no_obstacle(items):
    given_pod = parse_pod(using(affinity=asking(term("pool", "Later", "x"))), "pod")
    assert not any(find_obstacles(given_pod, node, {}) for node in parse_nodes(items.document, "nodes"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "Job"}, "expected a Pod, found 'Job'"),
        ({"kind": "List", "items": []}, "expected one pod, found 0"),
        ({"kind": None}, "kind"),
        ({"metadata": []}, "metadata: expected an object"),
        ({"spec": 7}, "spec: expected an object"),
        ({"spec": {"tolerations": ["x"]}}, "tolerations[0]: expected an object"),
        ({"spec": {"tolerations": [{"key": 1}]}}, "key: expected a string"),
        ({"spec": {"containers": {}}}, "containers: expected a list"),
        ({"spec": {"containers": [{"image": {}}]}}, "image: expected a string"),
        ({"spec": {"affinity": {"nodeAffinity": []}}}, "nodeAffinity: expected an object"),
        ({"spec": {"affinity": asking("x")}}, "nodeSelectorTerms[0]: expected an object"),
        ({"spec": {"affinity": asking({"matchExpressions": [{}]})}}, "key is missing"),
        ({"spec": {"affinity": asking(term("a", "In", 7))}}, "values[0]: expected a string"),
        ({"status": {"phase": []}}, "phase: expected a string"),
    ],
)
def test_an_invalid_pod_is_refused(change, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_pod(using() | change, "pod.json")


KEYS = st.sampled_from(
    [
        *("containers", "initContainers", "image", "resources", "limits", "nodeSelector", "affinity"),
        *("nodeAffinity", REQUIRED, "nodeSelectorTerms", "matchExpressions", "matchFields", "key", "labels"),
        *("operator", "values", "tolerations", "effect", "value", "nodeName", "resourceClaims"),
        *(CLASS, NVIDIA),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", NAME, "In", "Exists", CLASS]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(spec=st.dictionaries(KEYS, VALUES), metadata=st.dictionaries(KEYS, VALUES))
@settings(max_examples=300, deadline=None)
def test_any_pod_is_explained_or_refused(spec, metadata, decided):
    policy, nodes = decided
    document = {"kind": "Pod", "metadata": metadata, "spec": {"containers": [{"image": NAME}], **spec}}
    try:
        parsed = parse_pod(document, "pod")
    except UsageError:
        return
    assert all(explained.summary for explained in explain_pod(parsed, [policy], nodes))
    again = parse_pod(parsed.document, "pod")
    assert (again.document, again.gpus) == (parsed.document, parsed.gpus)


@pytest.fixture(scope="module")
def decided(cluster, make):
    """The policy of a cluster with one class, and its nodes."""
    nodes = parse_nodes(cluster.node("a", cluster.own(make.host(make.gpu(0)))), "nodes")
    catalog = replace(make.catalog(make.variant("reg.x/t:v1-old")), image="reg.x/t")
    return make_cluster_policy(nodes, catalog), KnownNodes(nodes, {})


@pytest.fixture
def saved(tmp_path, monkeypatch, catalog, items):
    """A folder with a pod, nodes and a catalog; return the pod's path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.json").write_text(json_documents.dump_json(catalog.to_json()))
    (tmp_path / "nodes.json").write_text(json.dumps(items.document))
    return tmp_path / "pod.json"


OPTIONS = ("--nodes", "nodes.json", "--catalog", "t.json")


def test_the_command(cli, saved, items, conforms, monkeypatch):
    items["a"]["spec"] = {"taints": [TAINT]}
    del items["b"]["metadata"]["labels"][CLASS]
    saved.with_name("nodes.json").write_text(json.dumps(items.document))
    saved.write_text(json.dumps(placed(items, "a", OLD, GPU)))
    result = cli("kubernetes", "explain", "pod.json", *OPTIONS)
    assert (result.code, result.err) == (3, "")
    first, second, *rest = result.out.splitlines()
    assert first.startswith(f"p: {OLD}: no node can run the pod: {items.class_of('a')}: the pod does not")
    assert second.startswith("  -> add a toleration of nvidia.com/gpu")
    assert any(line.split()[:4] == [items.class_of("a"), "1", "0", "old"] for line in rest)
    assert "left out: 1 node without a matching class label: b" in rest
    assert "    -> run it on a node with a GPU, and pass one" in rest
    document = conforms(json.loads(cli("kubernetes", "explain", "pod.json", *OPTIONS, "--json").out))
    (image,) = document["images"]
    assert (image["cause"], document["pod"], document["node"]) == ("NoNodeFits", "p", None)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(saved.read_bytes())))
    assert json.loads(cli("kubernetes", "explain", "-", *OPTIONS, "--json").out) == document


def test_the_command_counts_gpus_of_other_pods(cli, saved, items):
    saved.write_text(json.dumps(placed(items, "a", OLD, GPU)))
    assert cli("kubernetes", "explain", "pod.json", *OPTIONS).code == 0
    others = [using("x", GPU, nodeName=name) for name in ("a", "b")]
    for other in others:
        other["metadata"]["name"] = f"on-{other['spec']['nodeName']}"
    saved.with_name("pods.json").write_text(json.dumps({"kind": "List", "items": others}))
    result = cli("kubernetes", "explain", "pod.json", *OPTIONS, "--pods", "pods.json")
    assert (result.code, "found 0 of 2 free" in result.out) == (3, True)
    both = {"kind": "List", "items": [*items.document["items"], *others]}
    saved.with_name("nodes.json").write_text(json.dumps(both))
    assert cli("kubernetes", "explain", "pod.json", *OPTIONS).out == result.out


def test_the_gpus_that_a_pod_has_are_free_for_it(cli, saved, items):
    placed_pod = placed(items, "a", OLD, GPU, nodeName="a")
    placed_pod["metadata"]["namespace"] = "ml"
    other = using("x", GPU, nodeName="b")  # of the same name in another namespace
    saved.write_text(json.dumps(placed_pod))
    both = {"kind": "List", "items": [*items.document["items"], placed_pod, other]}
    saved.with_name("nodes.json").write_text(json.dumps(both))
    result = cli("kubernetes", "explain", "pod.json", *OPTIONS, "--json")
    (image,) = json.loads(result.out)["images"]
    (found,) = [each for each in image["classes"] if each["name"] == items.class_of("a")]
    assert (image["cause"], found["able"]) == (None, 1)
    assert "found 0 of 2 free" in str(found["obstacles"])


def test_a_selector_of_no_node_is_what_is_wrong(ask):
    """No node has the label, so admission knows nothing of it, and each class looks possible."""
    given = using()
    given["spec"]["nodeSelector"] = {"team": "none-has-it"}
    found = ask(given)
    assert found.cause == "NoNodeFits"
    assert "no node can run the pod: " in found.summary
    assert "the node selector asks for team=none-has-it" in found.summary


def test_the_command_takes_several_catalogs(cli, saved, make):
    other = replace(make.catalog(make.cpu_variant("reg.x/s:v1-cpu")), image="reg.x/s")
    saved.with_name("s.json").write_text(json_documents.dump_json(other.to_json()))
    saved.write_text(json.dumps(pod(NAME, "reg.x/s:v1", labels={CLASS: "x"})))
    document = json.loads(
        cli("kubernetes", "explain", "pod.json", *OPTIONS, "--catalog", "s.json", "--json").out
    )
    assert [(one["image"], one["cause"]) for one in document["images"]] == [
        (NAME, "NoClassMatches"),
        ("reg.x/s:v1", "NoClassMatches"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--catalog", "t.json", "--as", "x"], "--as is for a single --catalog"),
        (["--as", "other:v1"], "p uses no image of t.json: it has reg.x/t:v1"),
        (["--pods", "pod.json", "--nodes", "pod.json"], "--nodes and --pods are both pod.json"),
        (["--nodes", "pod.json"], "no nodes found"),
        (["--where", "python"], "invalid condition"),
    ],
)
def test_invalid_options_are_refused(cli, saved, words, message):
    saved.write_text(json.dumps(using()))
    cli("kubernetes", "explain", "pod.json", *OPTIONS, *words).refuses(2, message)


def test_stdin_is_read_once(cli, saved):
    saved.write_text(json.dumps(using()))
    cli("kubernetes", "explain", "-", "--nodes", "-", "--catalog", "t.json").fails(
        2, "only one file can be read from stdin"
    )
