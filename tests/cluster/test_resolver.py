"""The same image name on machines with different GPUs, for every engine, each with its own resolver."""

import json
import os
import shutil
import signal
import subprocess
import time

import pytest
from engines import ROOT
from podman import podman_settings
from processes import END_WITH_US

REGISTRY, ADDRESS = "127.0.0.1:5000", "127.0.0.1:5050"
IMAGE = "ml/anywhere"
NAME = f"{ADDRESS}/{IMAGE}:v1"
SHOW = ("cat", "/variant")
HOSTS = ROOT / "tests/hosts"
CELLS = {"n1": "8.6", "n2": "9.0"}  # machines with an A10 and an H200
PAYLOAD = 100_000_000
MATRIX = {
    "schema": "imagematrix.matrix/v1",
    "images": {
        f"{REGISTRY}/{IMAGE}": {"version": "v1", "template": "image.j2", "context": "context"},
    },
    "axes": {"cuda": ["12.4"], "compute": list(CELLS.values())},
}
TEMPLATE = "FROM debian:trixie\nCOPY payload /payload\nRUN echo {{ compute }} > /variant\n"
REGISTRIES = f'[[registry]]\nlocation = "{ADDRESS}"\ninsecure = true\n'


class Resolver:
    """A resolver on a node, which probes the node unless `options` describe it."""

    def __init__(self, node, address=ADDRESS, options=()):
        self._node = node
        self._address = address
        self._options = options or ("--state", node.folder / "state")
        self._process = None
        self.start()

    def start(self):
        words = ("resolver", "--upstream", REGISTRY, "--listen", self._address, *self._options)
        command = [*END_WITH_US, *self._node.inside, ROOT / ".venv/bin/imagematrix", *words]
        self._process = subprocess.Popen(
            list(map(str, command)), stderr=subprocess.PIPE, text=True, env=self._node.environment,
            start_new_session=True,
        )  # fmt: skip
        assert self._address in self._process.stderr.readline()

    def stop(self, how=signal.SIGTERM):
        os.killpg(self._process.pid, how)
        self._process.wait()
        self._process.stderr.close()

    def passed(self):
        """Return the bytes that the node's loopback has transferred so far."""
        with open(f"/proc/{self._process.pid}/net/dev") as lines:  # noqa: PTH123
            (line,) = (one for one in lines if one.strip().startswith("lo:"))
        return int(line.split()[1])


@pytest.fixture(scope="module")
def published(builder, tmp_path_factory):
    """The digests of a version's variants by their compute capability."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("templates", "context"):
        (folder / name).mkdir()
    (folder / "templates" / "image.j2").write_text(TEMPLATE)
    (folder / "context" / "payload").write_bytes(os.urandom(PAYLOAD))
    (folder / "matrix.yaml").write_text(json.dumps(MATRIX))
    for words in (("build", "--push"), ("publish", f"{REGISTRY}/{IMAGE}:v1")):
        done = builder.imagematrix(*words, cwd=folder)
        assert done.returncode == 0, done.stderr
    listed = json.loads(builder.imagematrix("ls", f"{REGISTRY}/{IMAGE}:v1", "--json").stdout)
    return {".".join(one["cubins"][0]): one["digest"] for one in listed["variants"]}


@pytest.fixture(scope="module")
def cluster(start_cluster, published):
    assert published
    cluster = start_cluster()
    cluster.add("n1", "milan-a10", 1)
    cluster.add("n2", "genoa-h200", 1)
    cluster.form()
    return cluster


@pytest.fixture(scope="module")
def resolvers(cluster):
    started = {node.name: Resolver(node) for node in cluster.nodes}
    yield started
    for one in started.values():
        one.stop()


@pytest.fixture(autouse=True)
def _no_image_outlives_its_test(cluster, resolvers):
    del resolvers
    yield
    for node in cluster.nodes:
        node.remove_containers()
        node.docker("rmi", "--force", NAME, check=False)


def test_docker(cluster):
    shown = {node.name: node.docker("run", "--rm", NAME, *SHOW).stdout.strip() for node in cluster.nodes}
    assert shown == CELLS


def test_one_swarm_service(cluster):
    show = ("sh", "-c", "echo $(hostname) $(cat /variant)")
    options = ("--mode", "global-job", "--no-resolve-image", "--hostname", "{{.Node.Hostname}}")
    cluster.manager.docker("service", "create", "-d", "--name", "one", *options, NAME, *show)
    cluster.wait(lambda: cluster.states("one") == ["complete", "complete"])
    lines = cluster.manager.docker("service", "logs", "--raw", "one").stdout.splitlines()
    assert dict(line.split() for line in lines) == CELLS
    cluster.manager.docker("service", "rm", "one")


def test_a_node_with_another_gpu_runs_another_variant_after_a_sweep(cluster, tmp_path):
    node, address = cluster.nodes[0], "127.0.0.1:5051"
    name = f"{address}/{IMAGE}:v1"
    host, changed = tmp_path / "host.json", tmp_path / "changed"
    shutil.copy(HOSTS / "milan-a10.json", host)
    resolver = Resolver(node, address, ("--host", host, "--changed", changed))
    try:
        assert node.docker("run", "--rm", name, *SHOW).stdout.strip() == CELLS["n1"]
        changed.unlink()
        shutil.copy(HOSTS / "genoa-h200.json", tmp_path / "next.json")
        (tmp_path / "next.json").replace(host)
        cluster.wait(changed.exists)
        assert node.docker("run", "--rm", name, *SHOW).stdout.strip() == CELLS["n1"], (
            "the engine has the name"
        )

        assert node.imagematrix("resolver", "--sweep", "--listen", address).stdout == f"{name}\n"

        assert node.docker("run", "--rm", name, *SHOW).stdout.strip() == CELLS["n2"]
        assert node.imagematrix("resolver", "--sweep", "--listen", address).stdout.strip() == ""
    finally:
        resolver.stop()
        node.docker("rmi", "--force", name, check=False)


def test_podman(cluster):
    shown = {}
    for node in cluster.nodes:
        folder = node.folder / "podman"
        folder.mkdir()
        settings = podman_settings(folder)
        (folder / "registries.conf").write_text(REGISTRIES)
        podman = [
            "podman",
            "--root",
            folder / "data",
            "--runroot",
            folder / "run",
            "run",
            "--rm",
            NAME,
            *SHOW,
        ]
        environment = {
            **node.environment,
            "CONTAINERS_CONF": str(settings),
            "CONTAINERS_REGISTRIES_CONF": str(folder / "registries.conf"),
        }
        command = list(map(str, [*node.inside, *podman]))
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        shown[node.name] = done.stdout.strip()
    assert shown == CELLS


def test_containerd_by_the_name_in_the_registry(cluster, published):
    name = f"{REGISTRY}/{IMAGE}:v1"
    shown = {}
    for node in cluster.nodes:
        words = ("--upstream", REGISTRY, "--listen", ADDRESS, "--containerd", node.folder / "certs.d")
        assert node.imagematrix("resolver", *words).returncode == 0
        ctr = ("ctr", "--address", node.folder / "run" / "containerd" / "containerd.sock", "-n", "test")
        node.run(*map(str, (*ctr, "images", "pull", "--hosts-dir", node.folder / "certs.d", name)))
        listed = node.run(*map(str, (*ctr, "images", "ls", f"name=={name}"))).stdout
        shown[node.name] = next(cell for cell, digest in published.items() if digest in listed)
    assert shown == CELLS


def test_names_of_another_variant_are_removed_from_containerd(cluster, published):
    node = cluster.nodes[0]
    socket = str(node.folder / "run/containerd/containerd.sock")
    ctr = ("ctr", "--address", socket, "-n", "test", "images")
    name = f"{REGISTRY}/{IMAGE}:v1"
    other = f"{REGISTRY}/{IMAGE}@{published[CELLS['n2']]}"
    node.run(*ctr, "pull", "--hosts-dir", str(node.folder / "certs.d"), other)
    words = ("--sweep", "--listen", ADDRESS, "--upstream", REGISTRY, "--namespace", "test")
    environment = {**node.environment, "CONTAINERD_ADDRESS": socket}
    assert node.imagematrix("resolver", *words, env=environment).stdout.strip() == ""
    node.run(*ctr, "tag", "--force", other, name)  # as with another GPU

    assert node.imagematrix("resolver", *words, env=environment).stdout.strip() == name

    assert node.run(*ctr, "ls", "-q").stdout.split() == [other]


def test_a_pull_survives_a_kill_of_the_resolver(cluster, resolvers):
    node, resolver = cluster.nodes[0], resolvers["n1"]
    node.docker("system", "prune", "--all", "--force")
    before = resolver.passed()
    command = ["docker", "pull", "--quiet", NAME]
    with subprocess.Popen(
        command, env=node.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as pull:
        while resolver.passed() < before + PAYLOAD // 10:
            assert pull.poll() is None
            time.sleep(0.002)
        resolver.stop(signal.SIGKILL)
        resolver.start()
        pull.communicate(timeout=240)
    if pull.returncode:  # docker retries by itself, but not with each of its stores
        node.docker("pull", "--quiet", NAME)
    shown = node.docker("run", "--rm", "--pull", "never", NAME, "sh", "-c", "wc -c < /payload; cat /variant")
    assert shown.stdout.split() == [str(PAYLOAD), CELLS["n1"]]


def test_without_the_registry_a_restarted_resolver_answers_the_same(cluster, resolvers):
    node, resolver = cluster.nodes[1], resolvers["n2"]
    assert node.docker("run", "--rm", NAME, *SHOW).stdout.strip() == CELLS["n2"]
    resolver.stop()
    registry = cluster.registries[1]
    registry.kill()
    try:
        resolver.start()
        ran = node.docker("run", "--rm", "--pull", "always", NAME, *SHOW)
        assert ran.stdout.strip() == CELLS["n2"]
        unknown = node.docker("pull", f"{ADDRESS}/{IMAGE}:v2", check=False)
        assert unknown.returncode != 0
    finally:
        registry.start()
