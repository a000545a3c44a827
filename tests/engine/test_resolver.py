"""One name for all nodes: engines pull by way of the resolver, and each gets its own variant."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from processes import END_WITH_US

from imagematrix.resolver.node import RARELY_S

ROOT = Path(__file__).parents[2]
HOSTS = ROOT / "tests" / "hosts"
CPU = {"cuda": ["none"], "march": ["x86-64-v2", "x86-64-v3"]}


@pytest.fixture
def published(engine, registry, project):
    """The name of a published version with two variants; the registry wants no login."""
    image = f"{registry.address}/ml/anywhere"
    folder = project(CPU, image=image)
    built = engine.imagematrix("build", "--push", cwd=folder)
    assert built.returncode == 0, built.stderr
    assert engine.imagematrix("publish", f"{image}:v1").returncode == 0
    return {march: one for march in CPU["march"] for one in built.stdout.split() if f"-{march}-" in one}


@pytest.fixture
def resolver(engine, registry):
    """Call it with a host's file to get the address of a resolver on such a node."""
    started = []

    def start(host):
        command = [
            *END_WITH_US,
            *engine.inside,
            ROOT / ".venv/bin/imagematrix",
            *("resolver", "--upstream", registry.address, "--listen", "127.0.0.1:0", "--host", host),
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


def test_one_name_gives_each_node_its_own_image(engine, published, resolver, tmp_path):
    laptop = json.loads((HOSTS / "laptop.json").read_text())
    old = tmp_path / "host.json"
    laptop["cpu"]["flags"].remove("avx2")
    old.write_text(json.dumps(laptop))
    labels, name = {}, ""
    for march, host in (("x86-64-v3", HOSTS / "laptop.json"), ("x86-64-v2", old)):
        name = f"{resolver(host)}/ml/anywhere:v1"
        ran = engine.docker("run", "--rm", "--pull", "always", name, "train", "--steps", "1", check=False)
        assert ran.returncode == 0, ran.stderr
        labels[march] = engine.inspect(name)["Config"]["Labels"]["io.imagematrix.cell"]
        digest = json.loads(engine.imagematrix("select", published[march], "--json").stdout)["digest"]
        assert digest in engine.inspect(name)["RepoDigests"][0]
    assert labels == {march: f"cpu-{march}" for march in labels}

    # The node gets another CPU, so the image that the engine kept under the name is now the wrong variant.
    address = name.partition("/")[0]
    held = engine.docker("run", "-d", "--entrypoint", "sleep", name, "600").stdout.strip()
    assert sweep(engine, address) == []
    becomes(old, "laptop")
    assert sweep(engine, address) == [name]
    assert engine.docker("inspect", name, check=False).returncode != 0
    assert engine.inspect(held)["State"]["Running"]
    engine.docker("pull", name)
    assert engine.inspect(name)["Config"]["Labels"]["io.imagematrix.cell"] == "cpu-x86-64-v3"
    becomes(old, "rome-a100")
    refused = engine.docker("pull", name, check=False)
    assert refused.returncode != 0
    assert "403 Forbidden" in refused.stderr, "the engine sends HEAD, whose answers have no body"


def becomes(file, name):
    """Replace a resolver's host, and wait until it checks for changes."""
    shutil.copy(HOSTS / f"{name}.json", file)
    time.sleep(1.5 * RARELY_S)


def sweep(engine, address):
    done = engine.imagematrix("resolver", "--sweep", "--listen", address)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
