"""Versions for both architectures in an engine of x86-64: what starts there, and what is removed."""

import json
from pathlib import Path

import pytest
from compiling import compiled
from emulating import ARM_GCC, fetch_arm64
from engines import Registry

pytestmark = pytest.mark.long

HOSTS = Path(__file__).parents[2] / "tests/hosts"
OWN = HOSTS / "laptop.json"
MATRIX = {
    "schema": "imagematrix.matrix/v1",
    "axes": {"platform": ["linux/amd64", "linux/arm64"], "march": ["x86-64", "armv8-a"]},
    "properties": {"march": {name: {"compiler": "gcc-14"} for name in ("x86-64", "armv8-a")}},
}
TEMPLATE = """\
FROM scratch
COPY program-{{ arch }} /program
COPY data-{{ arch }} /VERSION
CMD ["/program"]
"""
SOURCE = """\
#include <stdio.h>
int main(void) { puts(ARCH); }
"""
SIZES = {"x86_64": 1_000_000, "aarch64": 3_000_000}  # bytes of a file in the image
VERSIONS = {"v1": [], "v2": [], "v3": ["--only", "platform=linux/arm64"]}


@pytest.fixture(scope="module")
def image(engine, tmp_path_factory):
    """The name of an image in a registry: v1 and v2 are for both architectures, v3 is for arm64."""
    fetch_arm64()
    folder = tmp_path_factory.mktemp("project")
    (folder / "templates").mkdir()
    files = folder / "files"
    files.mkdir()
    for arch, compiler in (("x86_64", "gcc"), ("aarch64", ARM_GCC)):
        compiled(files / f"program-{arch}", SOURCE, "-static", f'-DARCH="{arch}"', compiler=compiler)
        (files / f"data-{arch}").write_bytes(b"x" * SIZES[arch])
    registry = Registry(engine, 5000)
    name = f"{registry.address}/ml/mixed"
    for version, only in VERSIONS.items():
        described = {name: {"version": version, "template": "image.j2", "context": "files"}}
        (folder / "matrix.yaml").write_text(json.dumps({**MATRIX, "images": described}))
        (folder / "templates/image.j2").write_text(TEMPLATE.replace("VERSION", version))
        for command in (["build", "--push", *only], ["publish", f"{name}:{version}"]):
            done = engine.imagematrix(*command, cwd=folder)
            assert done.returncode == 0, done.stderr
    for own in engine.images():
        engine.docker("rmi", own)
    yield name
    registry.remove()


@pytest.fixture
def foreign(tmp_path):
    """A saved host with arm64 and without GPUs, like `OWN`."""
    document = json.loads((HOSTS / "grace-hopper.json").read_text())
    path = tmp_path / "arm.json"
    path.write_text(json.dumps(document | {"gpus": [], "driver": None, "devices": []}))
    return path


def run(engine, name, *options):
    return engine.imagematrix("run", "--rm", "--gpus", "none", *options, name)


@pytest.mark.parametrize("registered", [False, True])
def test_what_starts_is_for_the_architecture_of_the_engine(engine, image, foreign, registered, request):
    """Even where the kernel would start a program of the other one, by an emulator."""
    if registered:
        request.getfixturevalue("emulator")
    done = run(engine, f"{image}:v1")
    assert (done.returncode, done.stdout) == (0, "x86_64\n"), done.stderr
    assert engine.docker("run", "--rm", f"{image}:v1").stdout == "x86_64\n", "what any client gets"
    refused = run(engine, f"{image}:v3")
    assert (refused.returncode, refused.stdout) == (3, "")
    assert "the image is for linux/arm64, and the host runs linux/amd64" in refused.stderr
    chosen = run(engine, f"{image}:v1", "--host", foreign)
    assert (chosen.returncode, chosen.stdout) == (2, "")
    assert "is for linux/arm64, and its engine runs on linux/amd64" in chosen.stderr


def test_a_version_goes_or_stays_with_its_images_for_both(engine, image, foreign):
    pulled = {}  # digests by version and host
    for version in VERSIONS:
        for file in (OWN, foreign) if version != "v3" else (foreign,):
            done = engine.imagematrix("pull", f"{image}:{version}", "--host", file)
            assert done.returncode == 0, done.stderr
            pulled[version, file.stem] = done.stdout.strip().partition("@")[2]
    for (_, host), digest in pulled.items():
        (inspected,) = json.loads(engine.docker("image", "inspect", f"{image}@{digest}").stdout)
        assert inspected["Architecture"] == ("amd64" if host == OWN.stem else "arm64")

    def prune(*words):
        document = json.loads(engine.imagematrix("prune", image, *words, "--json").stdout)
        found = {one["id"]: one for one in document["images"]}
        for (_, host), digest in pulled.items():
            data = SIZES["x86_64" if host == OWN.stem else "aarch64"]
            assert data < found[digest]["size"] < 3 * data, "that of its own platform"
        return {digest for digest in pulled.values() if found[digest]["status"] == "removed"}

    by_version = {
        version: {digest for (one, _), digest in pulled.items() if one == version} for version in VERSIONS
    }
    assert prune("--hosts", OWN) == by_version["v1"] | by_version["v3"], "v3 has nothing for it"
    assert prune("--hosts", foreign) == by_version["v1"] | by_version["v2"]
    assert prune("--hosts", OWN, "--hosts", foreign, "--yes") == by_version["v1"]
    for digest in pulled.values():
        gone = engine.docker("image", "inspect", f"{image}@{digest}", check=False).returncode != 0
        assert gone == (digest in by_version["v1"])
    done = run(engine, f"{image}:v2")
    assert (done.returncode, done.stdout) == (0, "x86_64\n"), done.stderr
