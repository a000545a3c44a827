"""Node Feature Discovery 0.17.3 in the cluster sets the labels in our feature file."""

import pytest
from machines import ROOT

pytestmark = [pytest.mark.since("1.36"), pytest.mark.usefixtures("discovery")]

CLASS, PREFIX = "imagematrix.io/class", "imagematrix.io/"
FOLDER = "/etc/kubernetes/node-feature-discovery/features.d"
WRITE = f"cd {FOLDER} && imagematrix kubernetes labels > .imagematrix && mv .imagematrix imagematrix"


def labels(cluster, node):
    """Return our labels that a node has."""
    found = cluster.get("node", node.name)["metadata"]["labels"]
    return {key: value for key, value in found.items() if key.startswith(PREFIX)}


def printed(node):
    """Return the labels that `kubernetes labels` prints on a node."""
    lines = node.imagematrix("kubernetes", "labels").stdout.splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def write(node):
    """Write the feature file as the page says."""
    path = f"{ROOT}/.venv/bin:{node.environment['PATH']}"
    node.run("mkdir", "-p", FOLDER)
    node.run("sh", "-c", WRITE, env={**node.environment, "PATH": path})


@pytest.fixture
def _written(cluster):
    """The feature files of all nodes, and the labels that follow from them."""
    for node in cluster.nodes:
        write(node)
    cluster.wait(lambda: all(labels(cluster, node) == printed(node) for node in cluster.nodes))
    yield
    for node in cluster.nodes:
        node.run("rm", "-f", f"{FOLDER}/imagematrix")
    cluster.wait(lambda: not any(labels(cluster, node) for node in cluster.nodes))


@pytest.mark.usefixtures("_written")
def test_labels_follow_the_file(cluster):
    node = cluster.nodes[1]
    before = labels(cluster, node)
    with node.driver("550.163.01"):
        write(node)
        cluster.wait(lambda: labels(cluster, node) == printed(node) != before)
    write(node)
    cluster.wait(lambda: labels(cluster, node) == before)
