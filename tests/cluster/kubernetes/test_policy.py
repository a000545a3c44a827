"""The admission policy of `render policy` in an API server: pods of all kinds run the image of their node."""

import json
from typing import Any

import pytest
import yaml
from administering import VARIANTS

pytestmark = pytest.mark.since("1.36")

CLASS, HOST = "imagematrix.io/class", "kubernetes.io/hostname"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
KINDS = [f"{kind}admissionpolicy{part}" for part in ("binding", "") for kind in ("mutating", "validating")]


@pytest.fixture(scope="module")
def enforce(cluster, training, tmp_path_factory):
    """Return a function that applies the policy with `--on-unknown`, and waits until it is in force."""
    cluster.label()
    nodes = tmp_path_factory.mktemp("policy") / "nodes.json"
    nodes.write_text(cluster.kubectl("get", "nodes", "-o", "json").stdout)

    def in_force():
        return tried(cluster, training.name, "n1").endswith(training.digests[VARIANTS["n1"]])

    def call(unknown):
        words = ("kubernetes", "render", "policy", training.name, "--nodes", nodes, "--on-unknown", unknown)
        made = list(yaml.safe_load_all(cluster.imagematrix(*words).stdout))
        for one in made:
            if "failurePolicy" in one["spec"]:
                one["spec"]["failurePolicy"] = "Fail"  # so that no error is silent
        remove()
        cluster.wait(lambda: not in_force())
        cluster.apply(*made)
        cluster.wait(in_force)

    def remove():
        cluster.kubectl("delete", ",".join(KINDS), "--all")

    yield call
    remove()


@pytest.fixture(scope="module")
def _denying(enforce):
    enforce("deny")


def tried(cluster, image, node):
    """Return the image of a pod that the API server would create."""
    selecting = json.dumps({"spec": {"nodeSelector": {HOST: node}}})
    words = ("run", "tried", f"--image={image}", f"--overrides={selecting}", "--dry-run=server")
    return cluster.kubectl(*words, "-o", "jsonpath={.spec.containers[0].image}").stdout


def asking(*terms):
    """Return an affinity to nodes that meet one of these terms, each a label or field with its value."""
    listed = [{part: [{"key": key, "operator": "In", "values": [value]}]} for part, key, value in terms]
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": listed}}}


def workload(kind, api, name, image, **pod):
    """Return a Deployment, DaemonSet or Job whose pods have a label with its name."""
    job = kind == "Job"
    container = {"name": "main", "image": image, "args": ["0" if job else "600"]}
    more = {"restartPolicy": "Never"} if job else {"terminationGracePeriodSeconds": 1}
    template = {"metadata": {"labels": {"app": name}}, "spec": {"containers": [container], **more, **pod}}
    selector = {} if job else {"selector": {"matchLabels": {"app": name}}}
    spec = {"template": template, **selector}
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name}, "spec": spec}


def runs(cluster, pod, node, training):
    """Wait until a pod runs or has ended; check its images, its node, and what it reports."""
    name = pod["metadata"]["name"]
    cluster.wait(lambda: cluster.phases(name)[0] in {"Running", "Succeeded"})
    now = cluster.get("pod", name)
    digest = training.digests[VARIANTS[node]]
    specs = [one["image"] for part in ("containers", "initContainers") for one in now["spec"].get(part, [])]
    assert {image.partition("@")[2] for image in specs} == {digest}
    assert {one["imageID"].partition("@")[2] for one in now["status"]["containerStatuses"]} == {digest}
    assert now["spec"]["nodeName"] == node
    cluster.wait(lambda: cluster.report(name).startswith(VARIANTS[node]))


@pytest.mark.usefixtures("_denying")
def test_pods_of_all_kinds_run_the_image_of_their_node(cluster, create, training):
    label = cluster.get("node", "n1")["metadata"]["labels"][CLASS]
    init = [{"name": "init", "image": training.name, "args": ["0"]}]
    several = asking(
        ("matchExpressions", CLASS, label),
        ("matchFields", "metadata.name", "n1"),
        ("matchExpressions", HOST, "n9"),
    )
    specs: dict[str, tuple[str, dict[str, Any]]] = {
        "selecting": ("n1", {"nodeSelector": {HOST: "n1"}}),
        "starting": ("n1", {"nodeSelector": {CLASS: label}, "initContainers": init}),
        "named": ("n2", {"nodeName": "n2"}),
        "several": ("n1", {"affinity": several}),
    }
    for name, (_, spec) in specs.items():
        done = create(name, training.name, **spec)
        assert done.returncode == 0, done.stderr
    for name, (node, _) in specs.items():
        runs(cluster, cluster.get("pod", name), node, training)
    terms = cluster.get("pod", "several")["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    wanted = {"key": CLASS, "operator": "In", "values": [label]}
    assert [wanted in term["matchExpressions"] for term in terms] == [True] * 3


def placed(cluster, app):
    """Return the pods with the label `app` by their nodes; those without a node are left out."""
    pods = cluster.get("pods", "-l", f"app={app}")["items"]
    return {one["spec"]["nodeName"]: one for one in pods if "nodeName" in one["spec"]}


@pytest.mark.usefixtures("_denying")
def test_controllers_pods_run_the_image_of_their_node(cluster, training):
    by_name = {"nodeSelector": {HOST: "n2"}}
    cluster.apply(
        workload("Deployment", "apps/v1", "deployed", training.name, **by_name),
        workload("DaemonSet", "apps/v1", "everywhere", training.name),
        workload("Job", "batch/v1", "once", training.name, affinity=asking(("matchExpressions", HOST, "n1"))),
    )
    try:
        for name, nodes in (("deployed", ["n2"]), ("everywhere", ["n1", "n2"]), ("once", ["n1"])):
            cluster.wait(lambda app=name, where=nodes: sorted(placed(cluster, app)) == where)
            for node, pod in placed(cluster, name).items():
                runs(cluster, pod, node, training)
    finally:
        cluster.kubectl("delete", "deployment/deployed", "daemonset/everywhere", "job/once")


@pytest.mark.usefixtures("_denying")
def test_an_ephemeral_container_gets_the_image_of_the_pod_s_node(cluster, create, training):
    other = training.name.replace(":v1", "@" + training.digests["cpu"])
    create("plain", other, nodeSelector={HOST: "n2"})
    cluster.wait(lambda: cluster.phases("plain") == ["Running"])
    assert "affinity" not in cluster.get("pod", "plain")["spec"]
    words = (f"--image={training.name}", "--container=debug", "--arguments-only", "--", "600")
    cluster.kubectl("debug", "plain", *words)
    cluster.wait(
        lambda: cluster.kubectl("logs", "plain", "-c", "debug", check=False).stdout.startswith(VARIANTS["n2"])
    )
    spec = cluster.get("pod", "plain")["spec"]
    (added,) = spec["ephemeralContainers"]
    assert added["image"].endswith(training.digests[VARIANTS["n2"]])
    assert spec["containers"][0]["image"] == other
    assert "affinity" not in spec


@pytest.mark.usefixtures("_denying")
def test_an_image_that_is_changed_runs_as_that_of_the_pod_s_node(cluster, create, training):
    cpu = training.name.replace(":v1", "@" + training.digests["cpu"])
    create("changed", cpu, nodeSelector={HOST: "n2"})
    cluster.wait(lambda: cluster.report("changed").startswith("cpu\n"))
    cluster.kubectl("set", "image", "pod/changed", f"main={training.name}")
    cluster.wait(lambda: cluster.report("changed").startswith(VARIANTS["n2"]))
    spec = cluster.get("pod", "changed")["spec"]
    assert spec["containers"][0]["image"].endswith(training.digests[VARIANTS["n2"]])
    assert "affinity" not in spec


@pytest.mark.usefixtures("_denying")
def test_a_pod_that_is_bound_to_a_node_of_another_class_does_not_start(cluster, create, training):
    """A binding is not asked about: the kubelet checks the affinity that the pod got."""
    labels = {CLASS: cluster.get("node", "n1")["metadata"]["labels"][CLASS]}
    create("bound", training.name, schedulerName="none", labels=labels)
    target = {"apiVersion": "v1", "kind": "Node", "name": "n2"}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "bound"}, "target": target}
    words = ("create", "--raw", "/api/v1/namespaces/default/pods/bound/binding", "-f", "-")
    cluster.kubectl(*words, input=json.dumps(binding))
    cluster.wait(lambda: cluster.phases("bound") == ["Failed"])
    assert cluster.get("pod", "bound")["status"]["reason"] == "NodeAffinity"


@pytest.mark.usefixtures("_denying")
def test_an_undecided_pod_is_refused_with_the_reason(cluster, create, training):
    labels = [cluster.get("node", node)["metadata"]["labels"][CLASS] for node in ("n1", "n2")]
    reason = f"need different images: {', '.join(sorted(labels))}; select one by {CLASS}"
    refused = create("anywhere", training.name)
    assert reason in refused.stderr
    nowhere = create("nowhere", training.name, nodeSelector={CLASS: "none"})
    assert "no class of nodes matches the pod's node selector" in nowhere.stderr
    # A controller's pods are refused too, and the controller reports the reason.
    cluster.apply(workload("Job", "batch/v1", "undecided", training.name))
    cluster.wait(lambda: reason in cluster.kubectl("describe", "job/undecided").stdout)
    cluster.kubectl("delete", "job/undecided")


def test_without_deny_an_undecided_pod_runs_the_default(cluster, create, enforce, training):
    enforce("default")
    assert create("left", training.name).returncode == 0
    assert cluster.get("pod", "left")["spec"]["containers"][0]["image"] == training.name
    cluster.wait(lambda: cluster.report("left").startswith("cpu\n"))
    create("right", training.name, nodeSelector={HOST: "n1"})
    runs(cluster, cluster.get("pod", "right"), "n1", training)
