"""Docker engines for the tests (tests/doubles/engines.py), and what they have in common."""

import ctypes
import json
import os
import shutil
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest
from engines import Engine, Registry, require
from gpu_node import GpuNode, profiles
from ordinary_user import _usable, archive, folder, kept_archive, stored, user  # noqa: F401 - fixtures
from processes import remove_leftovers
from xdist.scheduler import LoadScopeScheduling

from imagematrix.images.catalog import labels

ROOT = Path(__file__).parents[2]
CONTROL = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
NULL = os.makedev(1, 3)
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
CLONE_NEWNS = 0x20000  # of linux/sched.h
OWN_DEV = """\
mount --make-rprivate /
mount -t tmpfs -o mode=755 dev /mnt
cp -ax /dev/. /mnt
mount --rbind /dev/pts /mnt/pts
mount --rbind /dev/shm /mnt/shm
mount --move /mnt /dev
"""
# Files that one worker runs one after the other, longest first; any other file is a group of its own.
# Those of the first use images of the shipped matrix, which test_quickstart builds, or their build cache; or
# their containers have GPUs, which the engines of other tests then see in use.
GROUPS = (
    (
        "quickstart",
        "leases",
        "run",
        "node",
        "podman",
        "mig",
        "cdi_devices",
        "images",
        "verify",
        "doctor",
        "daemonless",
        "classic",
        "shares",
        "tags",  # at the end, because it empties the build cache
    ),
    ("warm", "warm_start", "names", "pull"),  # with the engine that has the classic store
    ("daemonless_isolation", "daemonless_life"),  # with an image that the first group has built meanwhile
    ("daemonless_warm",),
    ("gpu_bundle",),
    ("templates",),
    ("faults",),
    ("engines",),
    ("registry",),
)
LAST = ("builders", "ci")  # they clear the build cache of an engine


class GroupScheduling(LoadScopeScheduling):
    """Gives each worker a group of files at a time."""

    def _split_scope(self, nodeid):
        file = _file(nodeid)
        return next((group[0] for group in GROUPS if file in group), file)


def _file(nodeid):
    return Path(nodeid.partition("::")[0]).stem.removeprefix("test_")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items):
    """Order the files: those of GROUPS, all others, those of LAST."""
    order = {file: place for place, file in enumerate(chain.from_iterable(GROUPS))}

    def place(item):
        file = _file(item.nodeid)
        return file in LAST, order.get(file, len(order))

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def _own_dev():
    """Give these tests a /dev of their own, in a mount namespace that ends with them.

    GPU device nodes that tests create are visible to no other test, and none is left behind.
    """
    require()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNS)")
    subprocess.run(["sh", "-euc", OWN_DEV], check=True)


@pytest.fixture(scope="session")
def engines():
    """All engines that the tests have started."""
    started: list[Engine] = []
    yield started
    with ThreadPoolExecutor() as pool:
        list(pool.map(Engine.remove, started))


@pytest.fixture(autouse=True)
def _no_container_outlives_its_test(engines):
    """Remove containers before every test, because files run in any order."""
    yield
    for engine in engines:
        engine.remove_containers()


@pytest.fixture(scope="module", autouse=True)
def _no_image_outlives_its_file(engines):
    """Remove images after each file: a version is frozen, so equal names would collide."""
    before = {engine: engine.images() for engine in engines}
    yield
    for engine in engines:
        if engine.running and (made := engine.images() - before.get(engine, set())):
            engine.docker("rmi", "--force", *made)


@pytest.fixture(scope="session")
def start_engine(engines):
    """Call it with a store to get a new engine with the base images; an engine on a GpuNode has none."""
    remove_leftovers()
    subprocess.run([ROOT / "ci/bases", "archives"], check=True)

    def start(store="containerd", node=None):
        engine = Engine(store, node)
        engines.append(engine)
        engine.start()
        if not node:
            engine.seed()
        return engine

    return start


@pytest.fixture(scope="session")
def engine(start_engine):
    """The engine that most tests share; it has the containerd image store."""
    return start_engine()


@pytest.fixture(scope="session")
def classic(start_engine):
    """An engine with the classic image store."""
    return start_engine("classic")


@pytest.fixture(scope="session")
def simulate(engine, start_engine, tmp_path_factory):
    """Call it with a profile's name to get the engine of a machine with the profile's GPUs, simulated.

    It has an image for H100 and H200 with the driver 550.163.01, and one for any CPU.
    """
    cell = "cuda=12.4,compute=9.0,driver=550.163.01,march=x86-64-v3"
    engine.build_shipped(cell, "cuda=none,march=x86-64-v2")
    listed = json.loads(engine.imagematrix("ls", "training:v1", "--json").stdout)["variants"]
    image, cpu = (
        next(one["reference"] for one in listed if part in one["reference"])
        for part in ("-drv550.163.01-sm90-x86-64-v3-", "-cpu-x86-64-v2-")
    )

    def start(name):
        place = tmp_path_factory.mktemp("node")
        machine = GpuNode(place, name, profiles())
        node = start_engine(node=machine)
        with subprocess.Popen(
            ["docker", "save", image, cpu], env=engine.environment, stdout=subprocess.PIPE
        ) as saved:
            subprocess.run(["docker", "load"], env=node.environment, stdin=saved.stdout, check=True)
        # The driver in the image looks for a kernel module.
        driver = machine.libcuda.name
        (place / "Dockerfile").write_text(f"FROM {image}\nCOPY lib/{driver} {LIBRARIES}/{driver}\n")
        node.docker("build", "-t", image, str(place))
        # The image is to count as the variant of its name, so its label states the changed content.
        (found,) = json.loads(node.docker("image", "inspect", image).stdout)
        label = f"{labels.CONTENT}={labels.hash_content(found)}"
        node.docker("build", "--label", label, "-t", image, "-", input=f"FROM {image}\n")
        return node

    return start


@pytest.fixture(scope="session")
def node(simulate):
    """The engine of a machine with eight simulated GPUs."""
    return simulate("genoa-h200")


@pytest.fixture
def nodes():
    """Device nodes as on a GPU host, created with the number of /dev/null, so that they can be opened."""
    made = []
    for path in (*(f"/dev/nvidia{minor}" for minor in range(8)), *CONTROL):
        if not Path(path).exists():
            os.mknod(path, stat.S_IFCHR | 0o666, NULL)
            made.append(path)
    yield
    for path in made:
        Path(path).unlink()


@pytest.fixture
def start_registry(engine):
    """Call it with a port, and perhaps a login, to get a new registry beside the engine."""
    registries = []

    def start(port, login=None):
        registries.append(Registry(engine, port, login))
        return registries[-1]

    yield start
    for registry in registries:
        registry.remove()


@pytest.fixture
def registry(start_registry):
    return start_registry(5000)


@pytest.fixture
def emulator():
    """An emulator for arm64, which the kernel has for as long as the test runs."""
    subprocess.run([ROOT / "ci/emulator", "register"], check=True)
    yield
    subprocess.run([ROOT / "ci/emulator", "undo"], check=True)


@pytest.fixture
def project(tmp_path):
    """A folder with the shipped matrix and templates, narrowed to a few cells by `write`."""
    shutil.copytree(ROOT / "templates", tmp_path / "templates")

    def write(axes, *, image="training", version="v1", extra=""):
        listed = "".join(f"  {axis}: [{', '.join(values)}]\n" for axis, values in axes.items())
        text = (ROOT / "matrix.yaml").read_text()
        properties = text[text.index("properties:") : text.index("exclude:")]
        for line in properties.splitlines():
            value = line.strip().partition(":")[0].strip('"')
            if line.startswith("    ") and not any(value in values for values in axes.values()):
                properties = properties.replace(f"{line}\n", "")
        if "driver" not in axes:
            properties = properties.replace("  driver:\n", "")
        (tmp_path / "matrix.yaml").write_text(
            "schema: imagematrix.matrix/v1\n"
            f"images:\n  {image}:\n    version: {version}\n    template: training/Dockerfile.j2\n"
            f"    context: templates/training\n{extra}axes:\n{listed}{properties}"
        )
        return tmp_path

    return write
