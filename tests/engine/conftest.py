"""Docker engines for the tests: each in a network namespace of its own, with its own data and socket.

slirp4netns gives the namespace its way out (builds fetch packages), so that neither the machine's firewall
nor another engine on it is touched.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest
from gpu_node import GpuNode, profiles
from processes import END_WITH_US, new_folder, remove_folder, remove_leftovers
from xdist.scheduler import LoadScopeScheduling

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
# Those of the first use images of the shipped matrix, which test_quickstart builds, or their build cache.
GROUPS = (
    ("quickstart", "leases", "run", "node", "podman", "mig", "images", "verify", "doctor"),
    ("gpu_bundle",),
    ("templates",),
    ("tags",),
    ("faults",),
    ("registry",),
)
LAST = ("builders", "ci")  # they empty the build cache of an engine
# Images that files have in common; those of other names go when the file ends that made them.
SHARED = ("debian", "training")
NEEDED = ("dockerd", "docker", "docker-registry", "htpasswd", "slirp4netns", "unshare", "debootstrap")


class Engine:
    """A dockerd that the tests started; `store` is "containerd" or "classic", `node` the GpuNode it is on."""

    def __init__(self, store, node=None):
        self.store = store
        self.node = node
        self.folder = new_folder()
        (self.folder / "tmp").mkdir()
        self.host = f"unix://{self.folder}/docker.sock"
        self._processes = []

    def start(self):
        config = {
            "features": {"containerd-snapshotter": self.store == "containerd", "cdi": True},
            "experimental": True,  # until Docker 27 this is what CDI is
            "cdi-spec-dirs": [f"{self.folder}/cdi"],
        }
        (self.folder / "daemon.json").write_text(json.dumps(config))
        command = [
            *END_WITH_US,
            *("unshare", "--net", *(["--mount", *self.node.inside] if self.node else [])),
            *("dockerd", "--config-file", self.folder / "daemon.json", "--host", self.host),
            *("--data-root", self.folder / "data", "--exec-root", self.folder / "run"),
            *("--pidfile", self.folder / "pid"),
        ]
        with (self.folder / "log").open("ab") as log:
            dockerd = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            self._processes = [dockerd]
            self._wait(lambda: self._inode(dockerd.pid) != self._inode("self"))
            slirp = [
                *END_WITH_US,
                "slirp4netns",
                "--configure",
                "--mtu=65520",
                "--disable-host-loopback",
                str(dockerd.pid),
                "tap0",
            ]
            self._processes.append(subprocess.Popen(slirp, stdout=log, stderr=log, start_new_session=True))
        self._wait(lambda: self.docker("version", check=False).returncode == 0)

    @staticmethod
    def _inode(pid):
        return Path(f"/proc/{pid}/ns/net").stat().st_ino

    def _wait(self, ready):
        for _ in range(1200):
            if ready():
                return
            time.sleep(0.1)
        pytest.fail(f"no engine: {(self.folder / 'log').read_text()[-2000:]}")

    def stop(self, how=signal.SIGTERM):
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, how)
        for process in self._processes:
            process.wait(60)
        if how == signal.SIGKILL:
            self._stop_containerd()
        self._processes = []

    def _stop_containerd(self):
        # dockerd's own containerd outlives a dockerd that was killed.
        pid = self.folder / "run" / "containerd" / "containerd.pid"
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(int(pid.read_text()), signal.SIGKILL)
        pid.unlink(missing_ok=True)
        (self.folder / "pid").unlink(missing_ok=True)

    def remove(self):
        self.stop()
        remove_folder(self.folder)

    @property
    def environment(self):
        # `docker buildx bake` of 0.13 leaves a folder behind for each Dockerfile.
        places = {"IMAGEMATRIX_LOCKS": f"{self.folder}/locks", "TMPDIR": f"{self.folder}/tmp"}
        machine = self.node.environment if self.node else os.environ
        return {**machine, **places, "DOCKER_HOST": self.host, "NO_COLOR": "1"}

    def docker(self, *words, check=True):
        return subprocess.run(
            ["docker", *words], check=check, capture_output=True, text=True, env=self.environment
        )

    def has_no_containers(self):
        """Whether there is none left; the engine may still be removing those that ended."""
        for _ in range(300):
            if not self.docker("ps", "-aq").stdout:
                return True
            time.sleep(0.1)
        return False

    @property
    def running(self):
        return bool(self._processes)

    def remove_containers(self):
        if self.running and (names := self.docker("ps", "-aq").stdout.split()):
            self.docker("rm", "-f", *names, check=False)  # some may be gone meanwhile
            assert self.has_no_containers()

    def images(self):
        """Return the names of all images, but for those that files have in common."""
        names = self.docker("images", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
        return {name for name in names if name.partition(":")[0] not in SHARED and "<none>" not in name}

    def inspect(self, name):
        return json.loads(self.docker("inspect", name).stdout)[0]

    @property
    def inside(self):
        """The words that start a command in the engine's network, with the tests' registries, on its node."""
        spaces = f"/proc/{self._processes[0].pid}/ns"
        node = [f"--mount={spaces}/mnt", f"--wdns={ROOT}"] if self.node else []
        return ["nsenter", f"--net={spaces}/net", *node]

    def imagematrix(self, *words, **options):
        """Run our command line as a user does."""
        given = {"capture_output": True, "text": True, "env": self.environment, **options}
        command = [*self.inside, ROOT / ".venv/bin/imagematrix", *words]
        return subprocess.run(command, check=False, **given)

    def build_shipped(self, *expressions):
        """Build cells of the shipped matrix, and return the references of the images.

        It is copied for that: the bases of this engine get locked beside it.
        """
        copy = self.folder / "shipped"
        if not copy.exists():
            shutil.copytree(ROOT / "templates", copy / "templates")
            shutil.copy(ROOT / "matrix.yaml", copy)
        built = []
        for expression in expressions:
            done = self.imagematrix("build", "--json", "--only", expression, "-f", copy / "matrix.yaml")
            assert done.returncode == 0, done.stderr
            built += [cell["reference"] for cell in json.loads(done.stdout)["cells"] if cell["reference"]]
        return built

    def seed(self):
        for suite in ("bookworm", "trixie"):
            archive = ROOT / f".cache/bases/{suite}.tar"
            self.docker("import", "--change", 'CMD ["bash"]', str(archive), f"debian:{suite}")


class Registry:
    """A registry in the network of an engine, on a port of loopback; with a `login` it wants one."""

    def __init__(self, engine, port, login=None):
        self.engine = engine
        self.address = f"127.0.0.1:{port}"
        self.folder = new_folder()
        lines = ["version: 0.1", "log: {level: info}", f"http: {{addr: '{self.address}'}}"]
        lines += [
            f"storage: {{filesystem: {{rootdirectory: {self.folder}/data}}, delete: {{enabled: true}}}}"
        ]
        if login:
            lines.append(f"auth: {{htpasswd: {{realm: here, path: {self.folder}/htpasswd}}}}")
            made = subprocess.run(["htpasswd", "-nbB", *login], check=True, capture_output=True, text=True)
            (self.folder / "htpasswd").write_text(made.stdout)
        (self.folder / "config.yml").write_text("\n".join(lines) + "\n")
        self.start()

    def start(self):
        self._log = (self.folder / "log").open("wb")
        command = [
            *END_WITH_US,
            *self.engine.inside,
            "docker-registry",
            "serve",
            str(self.folder / "config.yml"),
        ]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        for _ in range(1200):
            if "listening on" in self.log:
                return
            time.sleep(0.05)
        pytest.fail(f"no registry: {self.log}")

    @property
    def log(self):
        return (self.folder / "log").read_text()

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._log.close()

    def remove(self):
        self.kill()
        remove_folder(self.folder)


def _require():
    missing = [name for name in NEEDED if not shutil.which(name)]
    if os.getuid() != 0:
        missing.append("root")
    if missing and os.environ.get("CI"):
        pytest.fail(f"the engine tests need {', '.join(missing)}: run them with `make engine`", pytrace=False)
    if missing:
        pytest.skip(f"the engine tests need {', '.join(missing)}: run `make engine` as root")


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

    The nodes of GPUs that some tests make are on no other test's machine, and stay on none.
    """
    _require()
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
    """Start every test on engines without containers, whatever ran before: files come in any order."""
    yield
    for engine in engines:
        engine.remove_containers()


@pytest.fixture(scope="module", autouse=True)
def _no_image_outlives_its_file(engines):
    """A version is frozen: what one file has built under a name would be in the way of another's."""
    before = {engine: engine.images() for engine in engines}
    yield
    for engine in engines:
        if engine.running and (made := engine.images() - before.get(engine, set())):
            engine.docker("rmi", "--force", *made)


@pytest.fixture(scope="session")
def start_engine(engines):
    """Call it with a store to get a new engine with the base images; one on a GpuNode comes without them."""
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
        folder = tmp_path_factory.mktemp("node")
        machine = GpuNode(folder, name, profiles())
        node = start_engine(node=machine)
        with subprocess.Popen(
            ["docker", "save", image, cpu], env=engine.environment, stdout=subprocess.PIPE
        ) as saved:
            subprocess.run(["docker", "load"], env=node.environment, stdin=saved.stdout, check=True)
        # The driver that is in the image looks for a kernel module.
        driver = machine.libcuda.name
        (folder / "Dockerfile").write_text(f"FROM {image}\nCOPY lib/{driver} {LIBRARIES}/{driver}\n")
        node.docker("build", "-t", image, str(folder))
        return node

    return start


@pytest.fixture(scope="session")
def node(simulate):
    """The engine of a machine with eight simulated GPUs."""
    return simulate("genoa-h200")


@pytest.fixture
def nodes():
    """Device nodes as a GPU host has them: made here, with the number of /dev/null so that they open."""
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
