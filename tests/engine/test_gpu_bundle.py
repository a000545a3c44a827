"""The GPU bundle on simulated machines that have nothing else.

Each is an empty tree with a Python and the driver, and with the network off. The GPUs are those of
tests/doubles/gpu_node.py.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest
from gpu_node import GpuNode, profiles

from imagematrix.images.catalog import image_index, labels

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
DOUBLES = ROOT / "tests/doubles"
LIMIT = 60 * 2**20
FILE_LIMIT = 3_000_000
UUID = re.compile(r"GPU-[0-9a-f]{8}-")
SERIAL = "1652922003123"
# The driver's files as the distribution installs them, or in one folder.
PLACES = {
    "system": ("usr/lib/x86_64-linux-gnu", "usr/bin"),
    "folder": ("usr/local/nvidia/lib64", "usr/local/nvidia/bin"),
}
SMI = """\
#!/usr/bin/python3
import ctypes, sys
sys.path.insert(0, "/opt/nvidia-smi")
ctypes.CDLL("/{library}/libnvidia-ml.so.1")
"""
# A mount of its own, because runc has to pivot to another root; and the root of its namespace, because the
# kernel gives no user namespace to a process below another root.
ENTER = """\
set -eu
tree=$1 layers=$2 own=$3; shift 3
mount -t overlay -o "lowerdir=$layers,upperdir=$own/upper,workdir=$own/work" tree "$tree"
for name in dev proc; do mount --rbind "/$name" "$tree/$name"; done
# The /sys of a sandbox is next to empty: it has no cgroups either.
[ -e "$own/node/sandboxed" ] || mount --rbind /sys "$tree/sys"
[ ! -d "$tree/usr/local/nvidia" ] || {
    mount --bind "$tree/usr/local/nvidia" "$tree/usr/local/nvidia"
    mount -o remount,bind,ro "$tree/usr/local/nvidia"
}
cd "$tree"
mkdir -p .old .proc
# A user namespace may mount a /proc only where it sees a whole one, and the node's has other files over it.
mount -t proc proc .proc
pivot_root . .old
umount --lazy .old
exec chroot "$@"
"""
# A registry on the loopback of a new network namespace, and a command that uses it.
ASK_REGISTRY = """\
import fcntl, socket, struct, subprocess, sys
UP, INDEX = 1, "application/vnd.oci.image.index.v1+json"
with socket.socket() as one:
    fcntl.ioctl(one, 0x8914, struct.pack("16sH14x", b"lo", UP))  # SIOCSIFFLAGS of linux/sockios.h
from distribution import Server
server = Server()
server.repository("ml/training").put("v1", sys.argv[1].encode(), INDEX)
print(server.address)
done = subprocess.run([*sys.argv[2:], f"{server.address}/ml/training:v1"], stdout=subprocess.PIPE)
server.close()
print(done.stdout.decode(), end="")
sys.exit(done.returncode)
"""
# For driver 550 and 9.0: cubins for 9.0 and 9.0a of CUDA 12.9's 30, and PTX up to ISA 8.4.
CODE = "286 loaded, and refused: 28 with 209, 210 with 222"
NO_DOCKER = "this machine has no docker"
NO_PYTORCH = "no Python of this machine has PyTorch"
# What the check of CUDA's cache of compiled PTX says.
PTX_CACHE = re.compile(r"[\d.]+ s, then [\d.]+ s with 2 files of cuda")
OF_ROOT, OF_RUNC, OF_AN_ENGINE, OF_PYTORCH = 3, 2, 4, 3  # checks
NOBODY = 65534


class Tree:
    """A machine to unpack the archive on: a minimal distribution, Python and a driver."""

    def __init__(self, base, node, place, folder):
        self.folder = folder
        self.own = {name: folder / name for name in ("upper", "work", "tree", "driver")}
        for path in self.own.values():
            path.mkdir()
        self.layers = f"{self.own['driver']}:{base}"
        self.node = node
        libraries, programs = PLACES[place]
        shutil.copytree(node.libcuda.parent, self.own["driver"] / libraries, symlinks=True)
        smi = self.own["driver"] / programs / "nvidia-smi"
        smi.parent.mkdir(parents=True)
        smi.write_text(SMI.format(library=libraries) + (DOUBLES / "nvidia_smi.py").read_text())
        smi.chmod(0o755)
        (self.own["driver"] / "opt/nvidia-smi").mkdir(parents=True)
        shutil.copy(pynvml.__file__, self.own["driver"] / "opt/nvidia-smi")
        self.home = self.own["upper"] / "srv"
        self.home.mkdir(mode=0o777)
        self.home.chmod(0o777)

    def run(self, *words, user=0, **environment):
        """Run a command in it, without a network."""
        given = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/srv",
            **{name: value for name, value in self.node.environment.items() if name.startswith("STUB_")},
        }
        command = [
            *("unshare", "--net", "--mount", *self.node.inside),
            *("sh", "-c", ENTER, "enter", self.own["tree"], self.layers, self.folder),
            *(f"--userspec={user}:{user}", "/", "env", "-C", "/srv"),
            *(f"{name}={value}" for name, value in environment.items()),
            *words,
        ]
        return subprocess.run(command, env=given, capture_output=True, text=True, check=False)

    @property
    def report(self):
        return (self.home / "gpu-report.md").read_text()


@pytest.fixture(scope="session")
def archive(tmp_path_factory):
    """The archive, as `make gpu-bundle` makes it."""
    path = tmp_path_factory.mktemp("dist") / "gpu-bundle.tar.gz"
    subprocess.run([sys.executable, ROOT / "ci/gpu_bundle", path], check=True)
    return path


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """Call it with a suite to get the tree of that Debian, with its Python and little else."""
    if os.getuid() != 0 or not shutil.which("debootstrap"):
        pytest.skip("empty trees need root and debootstrap: run `make engine` as root")
    made = {}

    def make(suite):
        if suite not in made:
            kept = ROOT / f".cache/bases/{suite}-python3.tar"
            subprocess.run([ROOT / "ci/bases", "python3"], check=True)
            made[suite] = tmp_path_factory.mktemp(suite)
            subprocess.run(["tar", "--extract", "--file", kept, "--directory", made[suite]], check=True)
        return made[suite]

    return make


@pytest.fixture
def machine(archive, base, tmp_path):
    """Call it to get a machine with the archive unpacked."""

    def make(suite, place, *, sandboxed=False, gpus=True):
        (tmp_path / "node").mkdir()
        node = GpuNode(tmp_path / "node", "genoa-h200", profiles(), sandboxed=sandboxed or not gpus)
        if not gpus:
            (tmp_path / "node/nodes").write_text("")
        tree = Tree(base(suite), node, place, tmp_path)
        shutil.copy(archive, tree.home)
        return tree

    return make


def outcomes(tree):
    """Return how each check ended, by its name."""
    rows = re.findall(r"(?m)^\| (.+?) \| (passed|FAILED|not tried) \| [\d.]+ \| (.*) \|$", tree.report)
    return {name: (how, why) for name, how, why in rows}


def test_the_archive_is_small(archive):
    assert archive.stat().st_size < LIMIT


def unpack(tree, **settings):
    code = "import tarfile; tarfile.open('gpu-bundle.tar.gz').extractall()"
    done = tree.run("python3", "-c", code, **settings)
    assert done.returncode == 0, done.stderr


def check(tree, *options, **settings):
    """Unpack the archive and run the checks; return the exit code."""
    unpack(tree, **settings)
    done = tree.run("gpu-bundle/check", "--steps", "2", *options, **settings)
    assert not UUID.search(tree.report), tree.report
    assert SERIAL not in tree.report
    return done.returncode


def not_tried(tree):
    return [why for how, why in outcomes(tree).values() if how == "not tried"]


def remarks(tree):
    """Return what checks that passed say, besides those of code and its cache, which say what they should."""
    passed = [why for how, why in outcomes(tree).values() if how == "passed"]
    assert [bool(PTX_CACHE.fullmatch(why)) for why in passed].count(True) == 1
    assert passed.count(CODE) == 1
    return [why for why in passed if why and why != CODE and not PTX_CACHE.fullmatch(why)]


@pytest.mark.parametrize(("suite", "place"), [("bookworm", "system"), ("trixie", "folder")])
def test_root_can_run_all_checks_except_those_of_an_engine(machine, suite, place):
    tree = machine(suite, place)
    assert check(tree) == 0, tree.report
    assert not_tried(tree) == [NO_DOCKER] * OF_AN_ENGINE + [NO_PYTORCH] * OF_PYTORCH
    assert remarks(tree) == []


def test_mounts_alone_are_used_where_runc_fails(machine):
    tree = machine("bookworm", "folder", sandboxed=True)
    # NVML reports process ids of the host.
    gpus = tree.node.environment["STUB_GPUS"].replace("procs=open", "procs=open,apart=1000000")
    assert check(tree, STUB_GPUS=gpus) == 0, tree.report
    reasons = not_tried(tree)
    assert all("no cgroup mount found" in reason for reason in reasons[:OF_RUNC])
    assert reasons[OF_RUNC:] == [NO_DOCKER] * OF_AN_ENGINE + [NO_PYTORCH] * OF_PYTORCH
    said = remarks(tree)
    assert len(said) == OF_ROOT
    assert all("cgroup" in remark for remark in said), said


def test_an_ordinary_user_can_run_checks_that_need_no_root(machine):
    tree = machine("trixie", "folder")
    made = tree.run("python3", "-m", "venv", "--without-pip", "venv", user=NOBODY)
    assert made.returncode == 0, made.stderr
    assert check(tree, user=NOBODY, PATH="/srv/venv/bin:/usr/bin:/bin") == 0, tree.report
    assert (
        not_tried(tree)
        == ["this needs root"] * OF_ROOT + [NO_DOCKER] * OF_AN_ENGINE + [NO_PYTORCH] * OF_PYTORCH
    )


def test_the_check_fails_without_a_gpu(machine):
    tree = machine("trixie", "system", gpus=False)
    assert check(tree) == 1
    assert "| FAILED |" in tree.report
    assert "no GPU was found" in tree.report


def test_the_time_limit_ends_the_check_with_a_report(machine):
    tree = machine("trixie", "system")
    assert check(tree, "--limit", "0.5", STUB_SLEEP="60") == 1
    ends = [how for how, why in outcomes(tree).values() if why == "the time was up"]
    assert ends[0] == "FAILED"
    assert set(ends[1:]) == {"not tried"}
    assert not list((tree.own["upper"] / "tmp").glob("gpu-check*"))


def test_the_zipapp_runs_on_a_bare_python(machine):
    tree = machine("bookworm", "system")
    unpack(tree)
    app = "gpu-bundle/imagematrix.pyz"
    assert (tree.home / app).stat().st_size < FILE_LIMIT
    host = json.loads(tree.run(app, "probe", "--json").stdout)
    target = {
        "cuda": "12.4",
        "cubins": ["90"],
        "driver": {"mode": "exact", "version": host["driver"]["version"]},
    }
    variant = {"reference": "t:v1-sm90", "platform": "linux/amd64", **target}
    catalog = {"schema": "imagematrix.catalog/v1", "image": "t", "version": "v1", "variants": [variant]}
    (tree.home / "t.json").write_text(json.dumps(catalog))
    of_a_registry = "127.0.0.1:5999/training:v1"
    for words, code, part in (
        (("select", "t:v1", "--catalog", "t.json"), 0, "t:v1-sm90\n"),
        (("explain", "t:v1", "--catalog", "t.json"), 0, "sm90 <- selected"),
        (("run", "--dry-run", "--gpus", "1", "--catalog", "t.json", "t:v1", "x"), 0, "docker run --device"),
        (("gpus",), 0, "NVIDIA H200"),
        (("doctor",), 8, "docker-command"),
        (("select", of_a_registry), 8, "cannot be reached"),
        (("plan",), 2, "install the whole package: `pip install '.[all]'` in a checkout"),
    ):
        done = tree.run(app, *words)
        assert (done.returncode, part in done.stdout + done.stderr) == (code, True), (words, done)

    shutil.copy(DOUBLES / "distribution.py", tree.home)
    result = {
        labels.VERSION: "v1",
        labels.CELL: "sm90",
        labels.INPUT: f"sha256:{'0' * 64}",
        labels.VARIANT: json.dumps({"platform": "linux/amd64", **target}),
    }
    digest = f"sha256:{'1' * 64}"
    listed = json.dumps({"manifests": [{"digest": digest, "size": 1, "annotations": result}]})
    published = image_index.write_index(
        image_index.parse_index(listed.encode(), "v1"), "ml/training", "v1"
    ).decode()
    for words, end in ((("select",), ""), (("run", "--dry-run", "--gpus", "1"), f"@{digest}")):
        done = tree.run("python3", "-c", ASK_REGISTRY, published, app, *words)
        assert done.returncode == 0, done.stderr
        address, answer = done.stdout.split("\n", 1)
        assert answer.split()[-1] == f"{address}/ml/training:v1-sm90-000000000000{end}"
