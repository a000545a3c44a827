"""Classes of real nodes, and the manifests that `render` writes for them, run by the cluster."""

import base64
import json

import pytest
import yaml

CLASS, GPU = "imagematrix.io/class", "imagematrix.io/gpu"
BY_NODE = {"n1": "sm_90 550.163.01", "n2": "sm_86 535.261.03"}  # what the image of each reports
LOGIN = ("user", "secret")


@pytest.fixture(scope="module", autouse=True)
def _plugins(cluster):
    cluster.label()
    for node in cluster.nodes:
        node.start_plugin()
    cluster.wait(lambda: all(GPU in node["status"]["allocatable"] for node in cluster.get("nodes")["items"]))
    yield
    for node in cluster.nodes:
        node.stop("plugin")


@pytest.fixture(autouse=True)
def _no_job_outlives_its_test(cluster):
    yield
    cluster.kubectl("delete", "jobs", "--all")


@pytest.fixture
def classes(cluster, training):
    """Return a function that returns the classes of the nodes by their current labels."""

    def ask(*options, check=True):
        listed = cluster.kubectl("get", "nodes", "-o", "json").stdout
        words = ("kubernetes", "classes", "--nodes", "-", "--catalog", training.name, "--json", *options)
        return json.loads(cluster.imagematrix(*words, input=listed, check=check).stdout)

    return ask


@pytest.fixture
def render(cluster, tmp_path):
    """Return a function that renders and applies Jobs for an image and options, and returns them."""

    def call(image, *options, **given):
        nodes = tmp_path / "nodes.json"
        nodes.write_text(cluster.kubectl("get", "nodes", "-o", "json").stdout)
        words = ("kubernetes", "render", "job", image, "--nodes", nodes, "--resource", GPU, "--gpus", "1")
        written = cluster.imagematrix(*words, *options, "--", "0", **given).stdout
        cluster.kubectl("apply", "-f", "-", input=written)
        return list(yaml.safe_load_all(written))

    return call


def ran(cluster, job):
    """Wait until a Job is complete; return its pod's node, the digest that ran, and its first report."""
    name = job["metadata"]["name"]
    cluster.wait(lambda: cluster.get("job", name)["status"].get("succeeded") == 1)
    (pod,) = cluster.get("pods", "-l", f"job-name={name}")["items"]
    (status,) = pod["status"]["containerStatuses"]
    report = cluster.report(pod["metadata"]["name"])
    return pod["spec"]["nodeName"], status["imageID"].partition("@")[2], report.partition("\n")[0]


def test_the_classes_of_the_real_nodes(cluster, classes, training):
    labels = {one["metadata"]["name"]: one["metadata"]["labels"] for one in cluster.get("nodes")["items"]}
    described = classes()["classes"]
    assert {tuple(one["nodes"]): (one["name"], one["digest"]) for one in described} == {
        (node,): (labels[node][CLASS], training.digests[variant]) for node, variant in BY_NODE.items()
    }


def test_each_class_runs_its_job_with_its_variant(cluster, render, training):
    results = [ran(cluster, job) for job in render(training.name)]
    assert sorted(results) == [(node, training.digests[what], what) for node, what in BY_NODE.items()]


def test_a_driver_upgrade_changes_the_class_and_with_it_the_image(cluster, classes, render, training):
    node = cluster.nodes[1]
    (before,) = [one["name"] for one in classes()["classes"] if one["nodes"] == ["n2"]]
    upgrade = classes("--driver", "535.261.03=550.163.01")["upgrades"]
    cluster.kubectl("cordon", "n2")
    old = next(job for job in render(training.name) if before in job["metadata"]["name"])
    with node.driver("550.163.01"):
        cluster.label()
        cluster.kubectl("uncordon", "n2")
        # The earlier pod has the image for the old driver, and cannot run there.
        pods = ("pods", "-l", f"job-name={old['metadata']['name']}")
        cluster.wait(lambda: "didn't match Pod's node affinity" in cluster.kubectl("describe", *pods).stdout)
        (pod,) = cluster.get(*pods)["items"]
        assert pod["status"]["phase"] == "Pending"
        results = [ran(cluster, job) for job in render(training.name)]
        now = BY_NODE | {"n2": "sm_86 550.163.01"}
        assert sorted(results) == [(name, training.digests[what], what) for name, what in now.items()]
    assert [change["hosts"] for one in upgrade for change in one["changed"]] == [["n2"]]
    cluster.label()


def test_a_registry_with_a_login_needs_a_pull_secret(cluster, render, training, tmp_path):
    registry = cluster.add_registry(5001, LOGIN)
    image = training.name.replace(cluster.registry, registry)
    login = ("--docker-username", LOGIN[0], "--docker-password", LOGIN[1])
    cluster.kubectl("create", "secret", "docker-registry", "logins", "--docker-server", registry, *login)
    kept = base64.b64decode(cluster.get("secret", "logins")["data"][".dockerconfigjson"])
    (tmp_path / "config.json").write_bytes(kept)  # as `docker login` writes it
    environment = {**cluster.control.environment, "DOCKER_CONFIG": str(tmp_path)}
    (job, _) = render(image, "--name", "without", env=environment)
    pods = ("pods", "-l", f"job-name={job['metadata']['name']}")
    cluster.wait(lambda: "no basic auth credentials" in cluster.kubectl("describe", *pods).stdout)
    results = [ran(cluster, job) for job in render(image, "--pull-secret", "logins", env=environment)]
    assert sorted(results) == [(node, training.digests[what], what) for node, what in BY_NODE.items()]
