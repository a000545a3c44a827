"""The DaemonSets of `render prepull`: each node gets the image of its class, and no other."""

import json

import pytest
import yaml
from administering import VARIANTS
from kube import PAUSE

pytestmark = pytest.mark.since("1.36")

LABEL = "app.kubernetes.io/name=training-prepull"
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"


@pytest.fixture
def applied(cluster, training, tmp_path):
    """The manifests, applied to a namespace that only admits restricted pods."""
    cluster.label()
    nodes = tmp_path / "nodes.json"
    nodes.write_text(cluster.kubectl("get", "nodes", "-o", "json").stdout)
    words = ("kubernetes", "render", "prepull", training.name, "--nodes", nodes, "--pause", PAUSE)
    written = cluster.imagematrix(*words).stdout
    cluster.kubectl("create", "namespace", "warm")
    cluster.kubectl("label", "namespace", "warm", RESTRICTED)
    for node in cluster.nodes:
        forget(node)
    cluster.kubectl("apply", "-n", "warm", "-f", "-", input=written)
    yield list(yaml.safe_load_all(written))
    cluster.kubectl("delete", "namespace", "warm")


def pulled(node):
    """Return the digests of the images that a node's kubelet can use."""
    done = node.run("ctr", "-n", "k8s.io", "images", "list", "-q")
    return {name.partition("@")[2] for name in done.stdout.split() if "@" in name}


def forget(node):
    """Remove all images of the training from a node."""
    names = node.run("ctr", "-n", "k8s.io", "images", "list", "-q").stdout.split()
    some = [name for name in names if "/ml/training" in name]
    if some:
        node.run("ctr", "-n", "k8s.io", "images", "rm", "--sync", *some)


def test_each_node_gets_the_image_of_its_class_and_no_other(cluster, applied, training):
    sets = [one["metadata"]["name"] for one in applied if one["kind"] == "DaemonSet"]
    assert len(sets) == 2
    for name in sets:
        cluster.kubectl("rollout", "status", "-n", "warm", f"daemonset/{name}", "--timeout=300s")
        status = cluster.get("daemonset", "-n", "warm", name)["status"]
        assert (status["desiredNumberScheduled"], status["numberReady"]) == (1, 1)
    ours = set(training.digests.values())
    for node in cluster.nodes:
        assert pulled(node) & ours == {training.digests[VARIANTS[node.name]]}
    pods = cluster.get("pods", "-n", "warm")["items"]
    ended = [one["status"]["initContainerStatuses"][0]["state"]["terminated"] for one in pods]
    assert [one["exitCode"] for one in ended] == [0, 0], json.dumps(ended)
