"""A Kubernetes cluster with two different nodes, and a version of an image with variants for both.

The variable IMAGEMATRIX_KUBERNETES names the release, see `releases`. A test with the marker `since` needs
that release or a newer one, and is deselected on older ones.
"""

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from drivers import library
from engines import ROOT
from kube import Kubernetes
from modules import built
from releases import chosen

TRUSTING = "FROM {0}\nCOPY ca.crt /ca.crt\nENV REQUESTS_CA_BUNDLE=/ca.crt\n"
DISCOVERY = "FROM scratch\nCOPY nfd-master nfd-worker /bin/\nENV PATH=/bin\nUSER 65534:65534\n"
SPACE_OF_DISCOVERY = "node-feature-discovery"
GPU = "imagematrix.io/gpu"
DRIVERS = ("535.261.03", "550.163.01")
MATRIX = {
    "schema": "imagematrix.matrix/v1",
    "axes": {"cuda": ["none", "12.4"], "driver": list(DRIVERS), "compute": ["8.6", "9.0"]},
    "exclude": [{"driver": DRIVERS[0], "compute": "9.0", "why": "Hopper nodes have the newer driver"}],
}


def pytest_collection_modifyitems(config, items):
    """Run the page first: its reader begins with an unused cluster. Deselect what the release cannot do."""
    items.sort(key=lambda item: item.path.stem != "test_pages")
    release = chosen()
    newer = [item for item in items if not all(map(release.has, _since(item)))]
    config.hook.pytest_deselected(items=newer)
    items[:] = [item for item in items if item not in newer]


def _since(item):
    return [marker.args[0] for marker in item.iter_markers("since")]


@pytest.fixture(scope="session")
def release():
    """The release of Kubernetes, which is built if it is missing."""
    found = chosen()
    found.require()
    return found


@pytest.fixture(scope="session")
def cluster(data, release):
    """The cluster: n1 has two H200s, n2 two A10s and an older driver."""
    started = Kubernetes(data, {"n1": ("genoa-h200", 2), "n2": ("milan-a10", 2)}, release)
    started.begin()
    yield started
    started.remove()


@pytest.fixture(scope="session")
def publish(cluster, builder, tmp_path_factory):
    """Return a function that builds and publishes a matrix as version v1 of a name.

    It returns the version's name in the cluster, and the digests of its variants by their reports.
    """

    def call(name, matrix):
        folder = tmp_path_factory.mktemp("project")
        context = shutil.copytree(Path(__file__).with_name("training"), folder / "context")
        (folder / "templates").mkdir()
        (context / "image.j2").rename(folder / "templates/image.j2")
        shutil.copy(cluster.release.programs / "bin/busybox", context)
        for version in matrix["axes"]["driver"]:
            library(context, "libcuda", version)
        image = f"127.0.0.1:5000/{name}"
        files = {"template": "image.j2", "context": "context"}
        described = {image: {"version": "v1", "device_code": "claim", **files}}  # it has no kernel
        (folder / "matrix.yaml").write_text(json.dumps({**matrix, "images": described}))
        for words in (("build", "--push"), ("publish", f"{image}:v1")):
            done = builder.imagematrix(*words, cwd=folder)
            assert done.returncode == 0, done.stderr
        listed = json.loads(builder.imagematrix("ls", f"{image}:v1", "--json").stdout)["variants"]
        digests = {
            f"sm_{one['cubins'][0]} {one['driver']['version']}" if one["cuda"] else "cpu": one["digest"]
            for one in listed
        }
        return SimpleNamespace(name=f"{cluster.registry}/{name}:v1", digests=digests)

    return call


@pytest.fixture(scope="session")
def training(publish):
    """A version with a variant for each node, one for a newer driver, and one for the CPU."""
    return publish("ml/training", MATRIX)


@pytest.fixture(scope="session")
def newer(publish):
    """A version for a driver that no node has."""
    axes = {"cuda": ["13.0"], "driver": ["580.65.06"], "compute": ["9.0"]}
    return publish("ml/llm", {"schema": MATRIX["schema"], "axes": axes})


@pytest.fixture(scope="session")
def program(cluster, builder):
    """The name of the image that `ci/program/build` builds, which also trusts the cluster's registry."""
    plain, name = (f"127.0.0.1:5000/imagematrix:{tag}" for tag in ("plain", "v1"))
    subprocess.run([ROOT / "ci/program/build", plain], check=True, env=builder.environment)
    builder.docker("push", plain)
    context = builder.folder / "program"
    context.mkdir()
    shutil.copy(cluster.control.authority, context / "ca.crt")
    (context / "Dockerfile").write_text(TRUSTING.format(plain))
    builder.docker("build", "-q", "-t", name, str(context))
    builder.docker("push", name)
    return name.replace("127.0.0.1:5000", cluster.registry)


@pytest.fixture(scope="session")
def newer_program(program, builder):
    """The name of another image with the program."""
    local = program.replace(program.partition("/")[0], "127.0.0.1:5000")
    other = local.replace(":v1", ":v2")
    builder.docker("build", "-q", "-t", other, "-", input=f"FROM {local}\nENV RELEASE=2\n")
    builder.docker("push", other)
    return program.replace(":v1", ":v2")


@pytest.fixture(scope="module")
def discovery(cluster, builder, tmp_path_factory):
    """Node Feature Discovery with its own manifests, which looks at nodes every 2 s; they have no labels yet.

    The value is the folder with its programs.
    """
    folder = built("nfd")
    context = tmp_path_factory.mktemp("discovery")
    (context / "Dockerfile").write_text(DISCOVERY)
    for name in ("nfd-master", "nfd-worker"):
        shutil.copy(folder / name, context)
    builder.docker("build", "-q", "-t", "127.0.0.1:5000/nfd:test", str(context))
    builder.docker("push", "127.0.0.1:5000/nfd:test")
    shutil.copytree(folder / "deployment", context / "deployment")
    settings = {"core": {"sleepInterval": "2s"}}
    (context / "deployment/components/worker-config/nfd-worker.conf.example").write_text(json.dumps(settings))
    overlay = context / "deployment/overlays/test"
    overlay.mkdir()
    image = {"name": "registry.k8s.io/nfd/node-feature-discovery", "newName": f"{cluster.registry}/nfd"}
    bases = ["base/rbac", "base/nfd-crds", "base/master", "base/worker-daemonset"]
    components = ["worker-config", "common", "master-config"]
    kustomization = {
        "namespace": SPACE_OF_DISCOVERY,
        "resources": [*(f"../../{base}" for base in bases), "namespace.yaml"],
        "components": [f"../../components/{component}" for component in components],
        "images": [image | {"newTag": "test"}],
    }
    (overlay / "kustomization.yaml").write_text(json.dumps(kustomization))
    shutil.copy(overlay / "../default/namespace.yaml", overlay)
    cluster.unlabel()
    cluster.kubectl("apply", "-k", overlay)
    for workload in ("deployment/nfd-master", "daemonset/nfd-worker"):
        words = ("rollout", "status", "-n", SPACE_OF_DISCOVERY, workload, "--timeout=300s")
        cluster.kubectl(*words)
    cluster.wait(lambda: len(cluster.get("nodefeatures", "-A")["items"]) == len(cluster.nodes))
    yield folder
    cluster.kubectl("delete", "-k", overlay)
    cluster.unlabel()


@pytest.fixture(scope="module")
def offered(cluster):
    """The two GPUs of n1, offered by our device plugin."""
    cluster.label()
    node = cluster.nodes[0]
    node.start_plugin()
    cluster.wait(lambda: cluster.get("node", "n1")["status"]["allocatable"].get(GPU) == "2")
    yield
    node.stop("plugin")


@pytest.fixture
def create(cluster):
    """Return a function that creates a pod from a name, an image and resources, deleted after the test.

    `claim` is the source of the pod's claim, such as {"resourceClaimName": "gpu"}.
    """
    names = []

    def start(name, image, resources=None, arguments=("600",), claim=None, labels=None, **spec):
        container = {"name": "main", "image": image, "args": list(arguments)}
        if resources:
            container["resources"] = {"limits": resources}
        if claim:
            container["resources"] = {"claims": [{"name": "gpu"}]}
            spec["resourceClaims"] = [{"name": "gpu", **claim}]
        names.append(name)
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels or {}}}
        given = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, **spec}
        return cluster.apply(pod | {"spec": {"containers": [container], **given}}, check=False)

    yield start
    if names:
        cluster.kubectl("delete", "pod", "--ignore-not-found", *names)
