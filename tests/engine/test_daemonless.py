"""Containers without a daemon, started by an ordinary user from images in a store of their own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USER = 1500
CELL = "cuda=12.4,compute=9.0,driver=550.163.01,march=x86-64-v3"
HOST = ("--host", ROOT / "tests/hosts/genoa-h200.json")
RUNTIMES = ("runc", "bwrap", "ch-run")
# The user may read this clone and its interpreter, wherever they are, and has no other right.
AS_USER = (
    "setpriv",
    *(f"--reuid={USER}", f"--regid={USER}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
)


class OrdinaryUser:
    """A user without root's rights, subordinate ids or an engine."""

    def __init__(self, folder, runtime="runc"):
        self.folder = folder
        self.engine = "charliecloud" if runtime == "ch-run" else "oci"
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "USER": "ordinary",
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "TMPDIR": str(folder / "tmp"),
            "IMAGEMATRIX_STORE": str(folder / "store"),
            "IMAGEMATRIX_LOCKS": str(folder / "locks"),
            "IMAGEMATRIX_ENGINE": self.engine,
            "IMAGEMATRIX_RUNTIME": "" if runtime == "ch-run" else runtime,
            "DOCKER_HOST": "unix:///nowhere.sock",
            "PYTHONPATH": str(ROOT),
        }

    def start(self, *words, **how):
        """Start the program, with its output in pipes."""
        return subprocess.Popen(
            [*AS_USER, sys.executable, "-P", "-m", "imagematrix", *map(str, words)],
            env=self.environment,
            cwd=self.folder,
            text=True,
            stdin=subprocess.DEVNULL if "input" not in how else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def imagematrix(self, *words, code=0):
        """Run the program to its end; return its output."""
        process = self.start(*words)
        out, error = process.communicate(timeout=300)
        assert process.returncode == code, (out, error)
        return out if code == 0 else error

    def run(self, *words, code=0):
        """Run a container of the image that the fixture `stored` pulled."""
        return self.imagematrix("run", *HOST, *words, code=code)


@pytest.fixture(scope="module")
def folder():
    made = Path(tempfile.mkdtemp(prefix="imx-user-"))
    made.chmod(0o755)
    for name in ("home", "run", "tmp", "store", "locks"):
        (made / name).mkdir()
        os.chown(made / name, USER, USER)
    (made / "locks").chmod(0o1777)
    os.chown(made, USER, USER)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def archive(engine, folder):
    """An archive with the variant for an H200, as `docker save` writes it."""
    engine.build_shipped(CELL)
    listed = json.loads(engine.imagematrix("ls", "training:v1", "--json").stdout)["variants"]
    reference = next(one["reference"] for one in listed if "-sm90-x86-64-v3-" in one["reference"])
    path = folder / "training.tar"
    with path.open("wb") as file:
        subprocess.run(["docker", "save", reference], env=engine.environment, stdout=file, check=True)
    path.chmod(0o644)
    return path


@pytest.fixture(scope="module")
def stored(archive, folder):
    """Pull the variant into the user's store; return REFERENCE@DIGEST."""
    user = OrdinaryUser(folder)
    return user.imagematrix("pull", "training:v1", *HOST, "--catalog", archive, "--to", folder / "store").strip()


@pytest.fixture(params=RUNTIMES)
def user(request, folder, stored, nodes):
    return OrdinaryUser(folder, request.param)


def test_a_container_has_its_gpus_and_no_others(user):
    out = user.run("--gpus", "device=2,3", "training:v1", "sh", "-c", "ls /dev | grep nvidia; id -u")
    *nodes, uid = out.split()
    assert nodes == ["nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidia2", "nvidia3", "nvidiactl"]
    assert uid == ("0" if user.environment["IMAGEMATRIX_RUNTIME"] == "runc" else str(USER))
