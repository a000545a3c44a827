"""An ordinary user, with a store of images of their own, who starts containers without a daemon."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USER = 20_000 + os.getpid() % 40_000  # its processes are counted and killed, so each run has another
CELL = "cuda=12.4,compute=9.0,driver=550.163.01,march=x86-64-v3"
HOST = ("--host", ROOT / "tests/hosts/genoa-h200.json")
# `make test-apptainer` runs the tests where there is an Apptainer.
ENGINES = {"runc": "oci", "bwrap": "oci", "ch-run": "charliecloud", "apptainer": "apptainer"}
RUNTIMES = ("runc", "bwrap", "ch-run", *(["apptainer"] if shutil.which("apptainer") else []))
# The user may read this clone and its interpreter, wherever they are, and has no other right.
AS_USER = (
    "setpriv",
    *(f"--reuid={USER}", f"--regid={USER}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
)


class OrdinaryUser:
    """A user without root's rights, subordinate ids or an engine."""

    prefix: tuple[str, ...] = AS_USER  # of each of its commands

    def __init__(self, folder, runtime="runc"):
        self.folder = folder
        self.runtime = runtime
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "USER": "ordinary",
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "TMPDIR": str(folder / "tmp"),
            "IMAGEMATRIX_STORE": str(folder / "store"),
            "IMAGEMATRIX_LOCKS": str(folder / "locks"),
            "IMAGEMATRIX_ENGINE": ENGINES[runtime],
            "IMAGEMATRIX_RUNTIME": runtime if ENGINES[runtime] == "oci" else "",
            "DOCKER_HOST": "unix:///nowhere.sock",
            "PYTHONPATH": str(ROOT),
        }

    def start(self, *words, **how):
        """Start the program, with its output in pipes."""
        return subprocess.Popen(
            [*self.prefix, sys.executable, "-P", "-m", "imagematrix", *map(str, words)],
            env=self.environment,
            cwd=self.folder,
            text=True,
            stdin=subprocess.DEVNULL if "input" not in how else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def imagematrix(self, *words, code=0):
        """Run the program to its end; return its output, or what it says if `code` is an error."""
        process = self.start(*words)
        out, error = process.communicate(timeout=300)
        assert code in (None, process.returncode), (out, error)
        return error if code else out

    def ends(self, *words):
        """Run the program to its end; return its exit code."""
        with self.start(*words) as process:
            process.communicate(timeout=300)
        return process.returncode

    def run(self, *words, code=0):
        """Run a container of the image that the fixture `stored` pulled."""
        return self.imagematrix("run", *HOST, *words, code=code)


class Root(OrdinaryUser):
    """Root, who can start containers without a daemon, too."""

    prefix = ()


def make_folders(made):
    for name in ("home", "run", "tmp", "store", "locks"):
        (made / name).mkdir()
    (made / "locks").chmod(0o1777)


@pytest.fixture(scope="module")
def folder():
    made = Path(tempfile.mkdtemp(prefix="imx-user-"))
    made.chmod(0o755)
    make_folders(made)
    for path in (made, *made.iterdir()):
        os.chown(path, USER, USER)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="session")
def kept_archive(tmp_path_factory):
    """Call it with an engine that may have the variant for an H200 to get an archive of it.

    All workers share the archive of the first, because the variant takes minutes to build.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path = folder / "training.tar"

    def keep(engine):
        if not path.exists():
            engine.build_shipped(CELL)
            listed = json.loads(engine.imagematrix("ls", "training:v1", "--json").stdout)["variants"]
            # Other tests leave variants with another driver in the engine that all share.
            reference = next(
                one["reference"] for one in listed if "-drv550.163.01-sm90-x86-64-v3-" in one["reference"]
            )
            part = path.with_name(f"{os.getpid()}.tar")
            with part.open("wb") as file:
                subprocess.run(["docker", "save", reference], env=engine.environment, stdout=file, check=True)
            part.rename(path)
        return path

    return keep


@pytest.fixture(scope="module")
def archive(engine, folder, kept_archive):
    """An archive with the variant for an H200, as `docker save` writes it, that the user can read."""
    path = folder / "training.tar"
    shutil.copy(kept_archive(engine), path)
    path.chmod(0o644)
    return path


@pytest.fixture(scope="module")
def stored(archive, folder):
    """Pull the variant into the user's store; return REFERENCE@DIGEST."""
    user = OrdinaryUser(folder)
    return user.imagematrix(
        "pull", "training:v1", *HOST, "--catalog", archive, "--to", folder / "store"
    ).strip()


@pytest.fixture
def _usable(nodes):  # noqa: ARG001 - which makes them
    """Let the user open the nodes, whatever the umask was."""
    for path in (Path("/dev/fuse"), *Path("/dev").glob("nvidia*")):
        path.chmod(0o666)


@pytest.fixture(params=RUNTIMES)
def user(request, folder, stored, _usable):  # noqa: ARG001 - for their effects
    return OrdinaryUser(folder, request.param)


def is_root_inside(user):
    return user.runtime in ("runc", "apptainer")


def squashfuses():
    """Return the processes that serve images; an ended one may wait for its parent."""
    listed = subprocess.run(
        ["ps", "-o", "stat=,args=", "-u", str(USER)], check=False, capture_output=True, text=True
    )
    return [line for line in listed.stdout.splitlines() if "squashfuse" in line and line[0] != "Z"]
