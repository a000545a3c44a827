"""`render jobset` and `render leaderworkerset` with the real controllers: one image for all ranks."""

import json

import pytest
import yaml
from modules import built

pytestmark = [pytest.mark.since("1.34"), pytest.mark.usefixtures("offered")]

CLASS, GPU = "imagematrix.io/class", "imagematrix.io/gpu"
H200 = "sm_90 550.163.01"  # what the image for n1 reports
PROGRAMS = {"jobset": "jobset", "lws": "cmd"}  # Go names them after their packages
DOCKERFILE = "FROM scratch\nCOPY {} /manager\nUSER 65532:65532\n"


@pytest.fixture(scope="module")
def install(cluster, builder, tmp_path_factory):
    """Return a function that installs a controller by the manifests of its module, with an image of ours."""
    installed = []

    def call(name):
        folder, module = tmp_path_factory.mktemp(name), built(name)
        (folder / "Dockerfile").write_text(DOCKERFILE.format(PROGRAMS[name]))
        image = f"127.0.0.1:5000/{name}:test"
        file = ("-f", str(folder / "Dockerfile"))
        builder.docker("build", "-q", "-t", image, *file, str(module))
        builder.docker("push", image)
        written = cluster.kubectl("kustomize", module / "config/default").stdout
        made = list(yaml.safe_load_all(written))
        (manager,) = (one for one in made if one["kind"] == "Deployment")
        (container,) = manager["spec"]["template"]["spec"]["containers"]
        container["image"] = image.replace("127.0.0.1:5000", cluster.registry)
        manifests = json.dumps({"apiVersion": "v1", "kind": "List", "items": made})
        installed.append(manifests)
        cluster.kubectl("apply", "--server-side", "-f", "-", input=manifests)
        where = manager["metadata"]
        words = ("-n", where["namespace"], f"deployment/{where['name']}", "--timeout=300s")
        cluster.kubectl("rollout", "status", *words)

    yield call
    for manifests in installed:
        cluster.kubectl("delete", "--ignore-not-found", "-f", "-", input=manifests)


@pytest.fixture
def nodes(cluster, tmp_path):
    """The nodes in a file, as commands take them."""
    path = tmp_path / "nodes.json"
    path.write_text(cluster.kubectl("get", "nodes", "-o", "json").stdout)
    return path


@pytest.fixture
def render(cluster, training, nodes):
    """Return a function that renders a kind of workload and applies it, removed after the test."""
    rendered = []

    def call(kind, *words):
        options = ("--nodes", nodes, "--resource", GPU, *words)
        written = cluster.imagematrix("kubernetes", "render", kind, training.name, *options).stdout
        # Before the webhooks of a controller answer, its objects are refused.
        cluster.wait(lambda: cluster.kubectl("apply", "-f", "-", input=written, check=False).returncode == 0)
        rendered.append(written)

    yield call
    for written in rendered:
        cluster.kubectl("delete", "--ignore-not-found", "-f", "-", input=written)
    cluster.wait(lambda: not cluster.get("pods")["items"])


def ranks(cluster, name):
    """Return the node of each pod of a workload, the digest that runs there, and what it reports."""
    pods = cluster.get("pods", "-l", f"app.kubernetes.io/name={name}")["items"]
    return [
        (
            pod["spec"]["nodeName"],
            pod["status"]["containerStatuses"][0]["imageID"].partition("@")[2],
            cluster.whole_report(pod["metadata"]["name"]).partition("\n")[0],
        )
        for pod in pods
    ]


def class_of(cluster, node):
    return cluster.get("node", node)["metadata"]["labels"][CLASS]


def is_true(cluster, thing, condition):
    """Whether a condition of an object is true."""
    listed = cluster.get(*thing).get("status", {}).get("conditions", ())
    return any((one["type"], one["status"]) == (condition, "True") for one in listed)


def test_a_gang_without_a_common_image_is_not_written(cluster, training, nodes):
    for kind in ("jobset", "leaderworkerset"):
        words = ("kubernetes", "render", kind, training.name, "--nodes", nodes, "--gpus", "1", "--pods", "2")
        done = cluster.imagematrix(*words, check=False)
        assert (done.returncode, done.stdout) == (3, "")
        assert "no variant fits all of the classes" in done.stderr


def test_all_ranks_of_a_jobset_run_one_image(cluster, install, render, training):
    install("jobset")
    one = ("--class", class_of(cluster, "n1"), "--gpus", "1", "--pods", "2")
    render("jobset", "--name", "gpus", *one, "--", "0")
    render("jobset", "--name", "both", "--allow-cpu", "--pods", "3", "--", "0")
    for name in ("gpus", "both"):
        cluster.wait(lambda name=name: is_true(cluster, ("jobset", name), "Completed"))
    assert ranks(cluster, "gpus") == [("n1", training.digests[H200], H200)] * 2
    assert [rank[1:] for rank in ranks(cluster, "both")] == [(training.digests["cpu"], "cpu")] * 3


def test_all_ranks_of_a_leaderworkerset_run_one_image(cluster, install, render, training):
    install("lws")
    one = ("--class", class_of(cluster, "n1"), "--gpus", "1", "--pods", "2")
    render("leaderworkerset", "--name", "serving", *one, "--", "600")
    cluster.wait(lambda: is_true(cluster, ("leaderworkerset", "serving"), "Available"))
    assert ranks(cluster, "serving") == [("n1", training.digests[H200], H200)] * 2
