"""One name for all nodes: engines pull through the resolver, and each gets its own variant."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engines import Registry
from processes import END_WITH_US

from imagematrix.integrations.resolver.node import INTERVAL_S

ROOT = Path(__file__).parents[2]
HOSTS = ROOT / "tests" / "hosts"
VARIANTS = {"old": ["sse4_2"], "new": ["sse4_2", "avx2"]}
MATRIX = {
    "schema": "imagematrix.matrix/v1",
    "axes": {"march": list(VARIANTS)},
    "facts": {"march": {name: {"flags": flags} for name, flags in VARIANTS.items()}},
}
NAME = "ml/anywhere"
EXPLAIN = "import requests, sys; print(requests.get(sys.argv[1], timeout=60).text)"


@pytest.fixture(scope="module")
def registry(engine):
    started = Registry(engine, 5003)
    yield started
    started.remove()


@pytest.fixture(scope="module")
def published(engine, registry, tmp_path_factory):
    """The digests of a published version's variants, and of its index; the registry wants no login."""
    folder = tmp_path_factory.mktemp("project")
    image = f"{registry.address}/{NAME}"
    for name in ("templates", "context"):
        (folder / name).mkdir()
    (folder / "templates" / "image.j2").write_text("FROM debian:trixie\nRUN echo {{ march }} > /variant\n")
    described = {image: {"version": "v1", "template": "image.j2", "context": "context"}}
    (folder / "matrix.yaml").write_text(json.dumps({**MATRIX, "images": described}))
    built = engine.imagematrix("build", "--push", "--json", cwd=folder)
    assert built.returncode == 0, built.stderr
    done = engine.imagematrix("publish", f"{image}:v1", "--json")
    assert done.returncode == 0, done.stderr
    listed = json.loads(engine.imagematrix("ls", f"{image}:v1", "--json").stdout)["variants"]
    return {one["march"]: one["digest"] for one in listed} | {"index": json.loads(done.stdout)["digest"]}


@pytest.fixture
def old(tmp_path):
    """The file of a host without AVX2."""
    laptop = json.loads((HOSTS / "laptop.json").read_text())
    laptop["cpu"]["flags"].remove("avx2")
    file = tmp_path / "host.json"
    file.write_text(json.dumps(laptop))
    return file


@pytest.fixture
def resolver(engine, registry):
    """Call it with a host's file, and options, to get the address of a resolver on such a node."""
    started = []

    def start(host, *options):
        command = [
            *END_WITH_US,
            *engine.inside,
            ROOT / ".venv/bin/imagematrix",
            *("resolver", "--upstream", registry.address, "--listen", "127.0.0.1:0", "--host", host),
            *options,
        ]
        process = subprocess.Popen(
            list(map(str, command)), stderr=subprocess.PIPE, text=True, env=engine.environment
        )
        started.append(process)
        return process.stderr.readline().split()[-1]

    yield start
    for process in started:
        process.terminate()
        assert process.wait(60) == 0
        process.stderr.close()


def is_refused(done, reason):
    """Whether a pull failed as it should. Docker before 29 only sends HEAD, whose answers have no body."""
    return done.returncode != 0 and ("403 Forbidden" in done.stderr or reason in done.stderr)


def test_one_name_gives_each_node_its_own_image(engine, published, resolver, old):
    name = ""
    for march, host in (("new", HOSTS / "laptop.json"), ("old", old)):
        name = f"{resolver(host)}/{NAME}:v1"
        assert (
            engine.docker("run", "--rm", "--pull", "always", name, "cat", "/variant").stdout == f"{march}\n"
        )
        assert published[march] in engine.inspect(name)["RepoDigests"][0]

    # The node gets another CPU, so the image that the engine kept under the name is now the wrong variant.
    address = name.partition("/")[0]
    held = engine.docker("run", "-d", name, "sleep", "600").stdout.strip()
    assert sweep(engine, address) == []
    set_host(old, "laptop")
    assert sweep(engine, address) == [name]
    assert engine.docker("inspect", name, check=False).returncode != 0
    assert engine.inspect(held)["State"]["Running"]
    engine.docker("pull", name)
    assert published["new"] in engine.inspect(name)["RepoDigests"][0]
    set_host(old, "rome-a100")
    refused = engine.docker("pull", name, check=False)
    assert is_refused(refused, "none of the 2 variants of ml/anywhere:v1 fits this host")


def test_containerd_uses_only_the_resolver(engine, registry, published, resolver, old, tmp_path):
    name = f"{registry.address}/{NAME}:v1"
    address = resolver(old)
    words = ("--upstream", registry.address, "--listen", address, "--containerd", tmp_path / "certs.d")
    assert engine.imagematrix("resolver", *words).returncode == 0
    pulled = ctr(engine, "pull", "--hosts-dir", tmp_path / "certs.d", name)
    assert pulled.returncode == 0, pulled.stderr
    assert published["old"] in ctr(engine, "ls", f"name=={name}").stdout
    set_host(old, "rome-a100")
    ctr(engine, "rm", name)
    refused = ctr(engine, "pull", "--hosts-dir", tmp_path / "certs.d", name)
    assert refused.returncode != 0, "the registry would answer with its default image"
    assert "403 Forbidden" in refused.stderr


def test_only_images_signed_by_cosign_are_served(engine, registry, published, resolver, tmp_path):
    if not shutil.which("cosign"):
        pytest.skip("cosign is not installed")
    image = f"{registry.address}/{NAME}"
    policy = tmp_path / "policy.json"
    rule = {"repository": "ml/*", "keys": ["cosign.pub"]}
    policy.write_text(json.dumps({"schema": "imagematrix.policy/v1", "rules": [rule], "otherwise": "deny"}))
    engine.cosign(tmp_path, "generate-key-pair")
    name = f"{resolver(HOSTS / 'laptop.json', '--policy', policy)}/{NAME}:v1"

    sign = ("sign", "--key", "cosign.key", "--tlog-upload=false", "--yes")
    engine.cosign(tmp_path, *sign, f"{image}@{published['new']}")
    refused = engine.docker("pull", name, check=False)
    assert is_refused(refused, "has no signature"), "the index is not signed, only the variant"

    engine.cosign(tmp_path, *sign, f"{image}@{published['index']}")
    assert engine.docker("run", "--rm", "--pull", "always", name, "cat", "/variant").stdout == "new\n"

    other = tmp_path / "other"
    other.mkdir()
    engine.cosign(other, "generate-key-pair")
    shutil.copy(other / "cosign.pub", tmp_path)
    name = f"{resolver(HOSTS / 'laptop.json', '--policy', policy)}/{NAME}:v1"
    command = [*engine.inside, sys.executable, "-c", EXPLAIN, f"http://{name.replace('/', '/explain/', 1)}"]
    explained = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fault = "has no valid signature: it is not signed with cosign.pub"
    assert f"{NAME}@{published['index']} {fault}" in explained


def set_host(file, name):
    """Replace a resolver's host, and wait until it checks for changes."""
    shutil.copy(HOSTS / f"{name}.json", file)
    time.sleep(1.5 * INTERVAL_S)


def sweep(engine, address):
    done = engine.imagematrix("resolver", "--sweep", "--listen", address)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def ctr(engine, *words):
    """Run a command on images of the engine's containerd, in a namespace of our own."""
    socket = engine.folder / "run" / "containerd" / "containerd.sock"
    command = [*engine.inside, "ctr", "--address", socket, "--namespace", "test", "images", *words]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
