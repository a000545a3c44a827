"""Node Feature Discovery 0.17.3 in the cluster: labels from our feature file, and its verdict on images."""

import json
import sys

import pytest
import yaml
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


@pytest.fixture(scope="module")
def attached(cluster, training):
    """The digests of the variants, each with its specification in the registry."""
    words = ("kubernetes", "render", "compatibility", training.name)
    specs = list(yaml.safe_load_all(cluster.imagematrix(*words).stdout))
    listed = json.loads(cluster.imagematrix("ls", training.name, "--json").stdout)["variants"]
    told = [one["compatibilities"][0]["description"] for one in specs]
    assert told == [f"needs of {one['reference']}" for one in listed]
    repository = training.name.rpartition(":")[0]
    for variant, spec in zip(listed, specs, strict=True):
        script = (sys.executable, ROOT / "tests/doubles/attach.py", repository, variant["digest"])
        cluster.control.run(*script, input=yaml.safe_dump(spec))
    return [variant["digest"] for variant in listed]


def compatible(cluster, node, program, name):
    """Whether NFD's client says on a node that an image is compatible."""
    trusting = {**node.environment, "SSL_CERT_FILE": str(cluster.control.authority)}
    words = ("compat", "validate-node", "--image", name, "--output-json")
    (status,) = json.loads(node.run(program, *words, env=trusting).stdout)
    return all(rule["isMatch"] for rule in status["rules"])


def fitting(cluster, node, training):
    """Return the digests of the variants that fit a node, according to `explain`."""
    trusting = {**node.environment, "REQUESTS_CA_BUNDLE": str(cluster.control.authority)}
    told = json.loads(node.imagematrix("explain", training.name, "--json", env=trusting).stdout)
    listed = json.loads(cluster.imagematrix("ls", training.name, "--json").stdout)["variants"]
    digests = {one["reference"]: one["digest"] for one in listed}
    return {digests[one["reference"]] for one in told["candidates"] if one["fits"]}


@pytest.mark.usefixtures("_written")
def test_its_client_and_select_agree(cluster, discovery, attached, training):
    repository = training.name.rpartition(":")[0]
    verdicts = {}

    def compare(node, when):
        names = {digest: f"{repository}@{digest}" for digest in attached}
        found = {digest for digest in attached if compatible(cluster, node, discovery / "nfd", names[digest])}
        assert found == fitting(cluster, node, training), (node.name, when)
        verdicts[node.name, when] = found

    for node in cluster.nodes:
        compare(node, "first")
    node = cluster.nodes[1]
    with node.driver("550.163.01"):
        write(node)
        compare(node, "upgraded")
    variants = ("sm_90 550.163.01", "sm_86 535.261.03", "sm_86 550.163.01")
    assert verdicts == {
        when: {training.digests[variant]}
        for when, variant in zip(
            (("n1", "first"), ("n2", "first"), ("n2", "upgraded")), variants, strict=True
        )
    }
