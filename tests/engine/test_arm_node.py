"""A node with arm64, whole: the file for nodes, run by the Python of an arm64 Debian on a CPU of QEMU.

Its facts are those of a captured Neoverse V2, and once those that QEMU shows. The version has images for both
architectures. The selected one is started by hand, in an engine whose kernel has an emulator.
"""

import json
import subprocess

import pytest
from compiling import compiled
from distribution import Server
from emulating import ARM_GCC, ARM_PYTHON, ROOT, fetch_arm64, on_arm
from images import Parts, layout, tar
from publishing import VARIANT, labels_of, tag
from storing import LAYERS, put

pytestmark = pytest.mark.long

CPUINFO = ROOT / "tests/unit/hardware/host/cpuinfo/rhel9-neoverse_v2"
SOURCE = """\
#include <stdio.h>
#include <sys/utsname.h>
int main(void) { struct utsname it; uname(&it); puts(it.machine); }
"""
CELLS = {
    "x86": ("amd64", VARIANT),
    "plain": ("arm64", {"platform": "linux/arm64", "march": "armv8-a", "cpu_flags": []}),
    "v2": ("arm64", {"platform": "linux/arm64", "march": "neoverse-v2", "cpu_flags": ["i8mm", "sve2"]}),
}


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """Call it with a command for the node and its CPU; it returns the output."""
    fetch_arm64()
    folder = tmp_path_factory.mktemp("node")
    program = folder / "imagematrix.pyz"
    subprocess.run([ROOT / ".venv/bin/python", ROOT / "ci/make_zipapp.py", program], check=True)
    home = ["-E", f"HOME={folder}"]

    def call(*words, model="neoverse-n2"):
        command = on_arm(model, [*home, ARM_PYTHON, program, *words])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The files of a node with a Neoverse V2 and no GPU."""
    folder = tmp_path_factory.mktemp("tree")
    (folder / "proc/sys/kernel").mkdir(parents=True)
    (folder / "proc/cpuinfo").write_text(CPUINFO.read_text())
    (folder / "proc/sys/kernel/arch").write_text("aarch64\n")
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """The images by cell, each with its tag. They have a program for arm64."""
    fetch_arm64()
    path = compiled(tmp_path_factory.mktemp("program") / "it", SOURCE, "-static", compiler=ARM_GCC)
    layers = (*LAYERS, tar(("bin/program", path.read_bytes(), 0o755)))
    made = {}
    for cell, (architecture, variant) in CELLS.items():
        own = labels_of(cell, VARIANT=json.dumps(variant))
        made[cell] = Parts(*layers, labels=own, architecture=architecture), tag(own)
    return made


@pytest.fixture(scope="module")
def version(images):
    """The name of a version in a registry, and the digests of its images by cell."""
    server = Server()
    yield put(server, *images.values()), {cell: image.digest for cell, (image, _) in images.items()}
    server.close()


def test_the_node_is_probed_and_gets_its_image(node, tree, version, tmp_path):
    name, digests = version
    host = json.loads(node("probe", "--root", tree, "--json"))
    assert (host["arch"], host["cpu"]["model"], host["warnings"]) == ("aarch64", "Neoverse-V2", [])
    (tmp_path / "host.json").write_text(json.dumps(host))
    selection = json.loads(node("select", name, "--host", tmp_path / "host.json", "--json"))
    assert selection["digest"] == digests["v2"]
    reasons = node("explain", name, "--host", tmp_path / "host.json")
    assert "the image is for linux/amd64, and the host runs linux/arm64" in reasons
    pulled = node("pull", name, "--root", tree, "--to", tmp_path / "store", "--unpacked")
    assert pulled.strip().endswith(f"@{digests['v2']}")
    (written,) = (tmp_path / "store/images").glob("*/root/data/new")
    assert written.read_bytes() == b"x" * 5000


@pytest.mark.usefixtures("emulator")
def test_the_selected_image_starts_by_its_digest(node, version, images, engine, tmp_path):
    name, _ = version
    digest = json.loads(node("select", name, "--gpus", "none", "--json"))["digest"]
    (image,) = (image for image, _ in images.values() if image.digest == digest)
    named = image.entry(annotations={"io.containerd.image.name": "docker.io/library/selected:v1"})
    files = layout(tmp_path / "layout", image, entries=[named])
    subprocess.run(["tar", "-C", files, "-cf", tmp_path / "image.tar", "."], check=True)
    engine.docker("load", "--input", tmp_path / "image.tar")
    by_digest = f"selected@{digest}"
    done = engine.docker("run", "--rm", "--platform", "linux/arm64", by_digest, "/bin/program")
    assert done.stdout == "aarch64\n"


def test_the_cpu_that_runs_the_program_decides_without_other_facts(node, version):
    name, digests = version
    for model, cell in (("neoverse-n2", "v2"), ("neoverse-v1", "plain")):
        selection = json.loads(node("select", name, "--gpus", "none", "--json", model=model))
        assert selection["digest"] == digests[cell]
