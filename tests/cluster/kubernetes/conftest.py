"""A Kubernetes with two nodes that differ, and a version of an image with variants for both of them."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from drivers import library
from kube import PROGRAMS, Kubernetes, require_kubernetes

IMAGE, VERSION = "ml/training", "v1"
DRIVERS = ("535.261.03", "550.163.01")
MATRIX = {
    "schema": "imagematrix.matrix/v1",
    "axes": {"cuda": ["none", "12.4"], "driver": list(DRIVERS), "compute": ["8.6", "9.0"]},
    "exclude": [{"driver": DRIVERS[0], "compute": "9.0", "why": "Hopper nodes have the newer driver"}],
}


@pytest.fixture(scope="session", autouse=True)
def _programs():
    require_kubernetes()


@pytest.fixture(scope="session")
def cluster(data):
    """The cluster: n1 has two H200s, n2 two A10s and an older driver."""
    started = Kubernetes(data, {"n1": ("genoa-h200", 2), "n2": ("milan-a10", 2)})
    started.begin()
    yield started
    started.remove()


@pytest.fixture(scope="session")
def training(cluster, builder, tmp_path_factory):
    """A published version: its name in the cluster, and the digests of its variants by what they report."""
    folder = tmp_path_factory.mktemp("project")
    context = shutil.copytree(Path(__file__).with_name("training"), folder / "context")
    (folder / "templates").mkdir()
    (context / "image.j2").rename(folder / "templates/image.j2")
    shutil.copy(PROGRAMS / "bin/busybox", context)
    for version in DRIVERS:
        library(context, "libcuda", version)
    image = f"127.0.0.1:5000/{IMAGE}"
    described = {image: {"version": VERSION, "template": "image.j2", "context": "context"}}
    (folder / "matrix.yaml").write_text(json.dumps({**MATRIX, "images": described}))
    built = builder.imagematrix("build", "--push", cwd=folder)
    assert built.returncode == 0, built.stderr
    done = builder.imagematrix("publish", f"{image}:{VERSION}")
    assert done.returncode == 0, done.stderr
    listed = json.loads(builder.imagematrix("ls", f"{image}:{VERSION}", "--json").stdout)["variants"]
    digests = {
        f"sm_{one['cubins'][0]} {one['driver']['version']}" if one["cuda"] else "cpu": one["digest"]
        for one in listed
    }
    return SimpleNamespace(name=f"{cluster.registry}/{IMAGE}:{VERSION}", digests=digests)


@pytest.fixture
def create(cluster):
    """Call it with a name, an image and perhaps resources, to create a pod; it is deleted after the test."""
    names = []

    def start(name, image, resources=None, arguments=("600",), **spec):
        container = {"name": "main", "image": image, "args": list(arguments)}
        if resources:
            container["resources"] = {"limits": resources}
        names.append(name)
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}
        given = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, **spec}
        return cluster.apply(pod | {"spec": {"containers": [container], **given}}, check=False)

    yield start
    if names:
        cluster.kubectl("delete", "pod", "--ignore-not-found", *names)
