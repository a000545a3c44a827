"""Podman as an engine, and the configuration with which it runs containers in the tests."""

import json
import subprocess
import time
from pathlib import Path

import pytest
from processes import END_WITH_US, new_folder, remove_folder

ROOT = Path(__file__).parents[2]

# runc also starts containers on machines with hybrid cgroups, and the limits need no privileges.
SETTINGS = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
netns = "none"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_config_dir = "{folder}/net"
"""


def podman_settings(folder):
    """Write a containers.conf into a folder, in which podman also keeps its networks; return its path."""
    path = folder / "containers.conf"
    path.write_text(SETTINGS.format(folder=folder))
    return path


class Podman:
    """A service of podman's on the machine of an Engine, with storage of its own.

    `release` is the name of one that `ci/engines` fetches; without it, it is the installed one.
    """

    def __init__(self, node, release=None):
        self.node = node
        self.folder = new_folder()
        self.host = f"unix://{self.folder}/podman.sock"
        settings = podman_settings(self.folder)
        self.environment = {**node.environment, "CONTAINERS_CONF": str(settings), "DOCKER_HOST": self.host}
        if release:
            programs = ROOT / f".cache/engines/{release}/bin"
            self.environment["PATH"] = f"{programs}:{self.environment['PATH']}"
        self.words = ["podman", "--root", self.folder / "data", "--runroot", self.folder / "run"]
        command = [*END_WITH_US, *node.inside, *self.words, "system", "service", "--time=0", self.host]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        for _ in range(300):
            if self.on_node("docker", "version").returncode == 0:
                return
            time.sleep(0.1)
        pytest.fail(f"no podman: {(self.folder / 'log').read_text()}")

    def on_node(self, *words, **options):
        command = [*self.node.inside, *words]
        given = {"capture_output": True, "text": True, "env": self.environment, **options}
        return subprocess.run(command, check=False, **given)

    def imagematrix(self, *words):
        return self.on_node(ROOT / ".venv/bin/imagematrix", *words)

    def answer(self, *words):
        return json.loads(self.imagematrix(*words, "--json").stdout)

    def remove(self):
        self._process.terminate()
        self._process.wait(60)
        remove_folder(self.folder)
