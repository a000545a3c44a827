"""The webhook in a cluster, as `render install` installs it, and DaemonSets for labels and devices."""

import json
import re

import pytest

CLASS, GPU = "imagematrix.io/class", "imagematrix.io/gpu"
SPACE = "imagematrix"


@pytest.fixture(scope="module")
def install(cluster, training, program):
    """Return a function that installs the webhook with options, or installs it again."""

    def call(*options):
        old = not cluster.release.has("1.28")
        words = ("--program", program, *(["--no-match-conditions"] if old else []), *options)
        written = cluster.imagematrix("kubernetes", "render", "install", training.name, *words).stdout
        if old:  # Kubernetes 1.20 has no policy/v1
            written = re.sub("policy/v1$", "policy/v1beta1", written, flags=re.MULTILINE)
        cluster.kubectl("apply", "-f", "-", input=written)
        cluster.kubectl("rollout", "status", "-n", SPACE, "deployment/imagematrix-webhook", "--timeout=120s")

    cluster.label()
    yield call
    cluster.uninstall()


@pytest.fixture(scope="module")
def _closed(install):
    """The webhook, which refuses undecided pods, and the plugin."""
    install("--on-unknown", "deny", "--device-plugin", "--by", "product")


@pytest.fixture
def named(cluster):
    """Return the class of a node by its name."""
    return lambda node: cluster.get("node", node)["metadata"]["labels"][CLASS]


def digest(pod):
    """Return the digest of all containers of a pod, including init containers; empty without a digest."""
    containers = pod["spec"]["containers"] + pod["spec"].get("initContainers", [])
    (value,) = {one["image"].partition("@")[2] for one in containers}
    return value


def placed(pod):
    """Return the classes that a pod's node affinity admits."""
    required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    return [one["values"] for one in term["matchExpressions"] if one["key"] == CLASS]


def manifest(kind, api, name, pod, labels=None, **spec):
    """Return a Deployment or Job whose pods have a label with its name."""
    template = {"metadata": {"labels": {"app": name} | (labels or {})}, "spec": pod}
    given = {"template": template, **spec}
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name}, "spec": given}


@pytest.mark.usefixtures("_closed")
def test_pods_of_three_kinds_get_the_digest_of_their_class(cluster, create, named, training):
    containers = [{"name": "main", "image": training.name, "args": ["600"]}]
    by_node = {"nodeSelector": {"kubernetes.io/hostname": "n2"}, "terminationGracePeriodSeconds": 1}
    expression = {"key": CLASS, "operator": "In", "values": [named("n1")]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    init = [{"name": "init", "image": training.name, "args": ["0"]}]
    created = create("alone", training.name, nodeSelector={CLASS: named("n1")}, initContainers=init)
    assert created.returncode == 0, created.stderr
    deployment = manifest(
        *("Deployment", "apps/v1", "deployed", {"containers": containers, **by_node}),
        replicas=2,
        selector={"matchLabels": {"app": "deployed"}},
    )
    once = {"containers": [containers[0] | {"args": ["0"]}], "restartPolicy": "Never", "affinity": affinity}
    cluster.apply(deployment, manifest("Job", "batch/v1", "once", once))
    cluster.kubectl("rollout", "status", "deployment/deployed", "--timeout=120s")
    cluster.kubectl("wait", "--for=condition=complete", "job/once", "--timeout=120s")
    cluster.wait(lambda: cluster.phases("alone") == ["Running"])
    expected = {"alone": "n1", "once": "n1", "deployed": "n2"}
    variants = {"n1": "sm_90 550.163.01", "n2": "sm_86 535.261.03"}
    for pod in (cluster.get("pod", "alone"), *cluster.get("pods", "-l", "app")["items"]):
        node = expected[pod["metadata"].get("labels", {}).get("app", "alone")]
        name, spec = pod["metadata"]["name"], pod["spec"]
        assert digest(pod) == training.digests[variants[node]]
        assert set(map(tuple, placed(pod))) == {(named(node),)}
        assert spec["nodeName"] == node
        cluster.wait(lambda name=name, node=node: cluster.report(name).startswith(variants[node]))
    cluster.kubectl("delete", "deployment/deployed", "job/once")


@pytest.mark.usefixtures("_closed")
def test_an_undecided_pod_is_refused_with_the_reason(cluster, create, named, training):
    refused = create("anywhere", training.name)
    assert refused.returncode != 0
    classes = ", ".join(sorted(named(node) for node in ("n1", "n2")))
    assert f"need different images: {classes}; select one by {CLASS}" in refused.stderr
    other = create("other", training.name.replace("training:v1", "other:v1"))
    assert other.returncode == 0, "only the image's own pods are looked at"
    assert "affinity" not in cluster.get("pod", "other")["spec"]
    # A controller's pods are refused too, and the controller reports the reason.
    pod = {"containers": [{"name": "main", "image": training.name}], "restartPolicy": "Never"}
    cluster.apply(manifest("Job", "batch/v1", "undecided", pod))
    cluster.wait(lambda: "need different images" in cluster.kubectl("describe", "job/undecided").stdout)
    cluster.kubectl("delete", "job/undecided")


@pytest.mark.usefixtures("_closed")
def test_the_plugin_in_its_pod_allocates_gpus(cluster, create, named, training):
    cluster.wait(lambda: all(GPU in node["status"]["allocatable"] for node in cluster.get("nodes")["items"]))
    create("with-gpu", training.name, {f"{GPU}-h200": "1"}, nodeSelector={CLASS: named("n1")})
    cluster.wait(lambda: cluster.phases("with-gpu") == ["Running"])
    assert "IMAGEMATRIX_GPUS=GPU-" in cluster.whole_report("with-gpu")


@pytest.mark.usefixtures("_closed")
def test_labels_of_the_daemonset_are_those_of_the_node_but_for_its_memory(cluster):
    """A pod has no NVML, which alone tells the memory, and the class's name depends on it."""
    file = "/etc/kubernetes/node-feature-discovery/features.d/imagematrix"
    of_memory = {CLASS, "imagematrix.io/gpu.memory-min"}
    for node in cluster.nodes:
        cluster.wait(lambda node=node: node.run("cat", file, check=False).returncode == 0)
        written = dict(line.split("=", 1) for line in node.run("cat", file).stdout.splitlines()[1:])
        labels = cluster.get("node", node.name)["metadata"]["labels"]
        expected = {
            key: re.sub("_[0-9]+$", "_unknown", value) if "/gpu-kind." in key else value
            for key, value in labels.items()
            if key.startswith("imagematrix.io/")
        }
        assert written.pop("imagematrix.io/gpu.memory-min") == "0"
        assert written.pop(CLASS).rpartition("-")[0] == expected[CLASS].rpartition("-")[0]
        assert written == {key: value for key, value in expected.items() if key not in of_memory}


@pytest.mark.usefixtures("_closed")
def test_later_pods_follow_a_node_whose_class_changes(cluster, create, named, training):
    spec = json.dumps({"spec": {"nodeSelector": {"kubernetes.io/hostname": "n2"}}})
    words = ("run", "later", f"--image={training.name}", f"--overrides={spec}", "--dry-run=server")

    def later():
        return digest(json.loads(cluster.kubectl(*words, "-o", "json").stdout))

    assert later() == training.digests["sm_86 535.261.03"]
    with cluster.nodes[1].driver("550.163.01"):
        before = named("n2")
        cluster.label()
        cluster.wait(lambda: later() == training.digests["sm_86 550.163.01"])
        refused = create("gone", training.name, nodeSelector={CLASS: before})
        assert "no class of nodes matches the pod's node selector" in refused.stderr
    cluster.label()
    cluster.wait(lambda: later() == training.digests["sm_86 535.261.03"])


def scale(cluster, replicas):
    """Set the number of the webhook's pods, and wait until it is reached."""
    cluster.kubectl("scale", "-n", SPACE, "deployment/imagematrix-webhook", f"--replicas={replicas}")
    pods = ("pods", "-n", SPACE, "-l", "app.kubernetes.io/name=imagematrix-webhook")

    def ready():
        # A pod that was just created has no status of its container yet.
        statuses = [pod["status"].get("containerStatuses") for pod in cluster.get(*pods)["items"]]
        return len(statuses) == replicas and all(status and status[0]["ready"] for status in statuses)

    cluster.wait(ready)


@pytest.mark.usefixtures("_closed")
def test_an_unreachable_webhook_fails_closed(cluster, create, named, training):
    scale(cluster, 0)
    cluster.wait(lambda: "failed calling webhook" in create("away", training.name).stderr)
    scale(cluster, 2)
    selected = {CLASS: named("n1")}
    cluster.wait(lambda: create("back", training.name, nodeSelector=selected).returncode == 0)
    assert digest(cluster.get("pod", "back")) == training.digests["sm_90 550.163.01"]


@pytest.mark.usefixtures("_closed")
def test_a_new_certificate_is_used_without_a_restart(cluster, create, install, named, training):
    pods = ("pods", "-n", SPACE, "-l", "app.kubernetes.io/name=imagematrix-webhook")
    before = {pod["metadata"]["name"] for pod in cluster.get(*pods)["items"]}
    install("--on-unknown", "deny", "--device-plugin", "--by", "product")
    selected = {CLASS: named("n1")}
    # Several in a row, because there are two replicas.
    for number in range(6):
        name = f"new{number}"
        cluster.wait(
            lambda name=name: create(name, training.name, nodeSelector=selected).returncode == 0, 180
        )
        assert digest(cluster.get("pod", name)) == training.digests["sm_90 550.163.01"]
    assert {pod["metadata"]["name"] for pod in cluster.get(*pods)["items"]} == before


def test_failing_open_leaves_pods_the_default(cluster, create, install, named, training):
    install("--on-unknown", "default")
    done = create("left", training.name)
    assert done.returncode == 0
    assert "Warning: " in done.stderr
    assert "need different images" in done.stderr
    assert cluster.get("pod", "left")["spec"]["containers"][0]["image"] == training.name
    cluster.wait(lambda: cluster.report("left").startswith("cpu\n"))
    scale(cluster, 0)
    done = create("open", training.name, nodeSelector={CLASS: named("n1")})
    assert done.returncode == 0, done.stderr
    assert cluster.get("pod", "open")["spec"]["containers"][0]["image"] == training.name
