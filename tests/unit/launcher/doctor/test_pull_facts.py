"""What the engines of this machine say about how they pull.

A program stands for containerd, which tells its version and prints its file as the real one does.
"""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from compiling import compiled

from imagematrix.hardware.host.tree import Tree
from imagematrix.images.engine import endpoint, engine_process
from imagematrix.images.engine.engine_process import EngineProcess
from imagematrix.launcher.doctor import pull_facts
from imagematrix.launcher.doctor.pull_facts import gather_pull_facts
from imagematrix.launcher.doctor.pulls import DockerFacts, PodmanFacts

CONTAINERD = r"""
#include <fcntl.h>
#include <string.h>
#include <unistd.h>
int main(int count, char **words) {
    static char text[1 << 16];
    for (int i = 1; i < count; i++) {
        if (!strcmp(words[i], "--version")) { write(1, "containerd example 2.4.2 c0ffee\n", 32); return 0; }
        if (!strcmp(words[i], "dump")) {
            int file = open(words[2], O_RDONLY);
            write(1, text, read(file, text, sizeof text));
            return strstr(text, "[plugins") == 0;
        }
    }
    pause();
}
"""
CONFIG = '[plugins."io.containerd.transfer.v1.local"]\nmax_concurrent_unpacks = {}\n'


@pytest.fixture
def start(tmp_path):
    """Call it with the text of a file to start a program that is called containerd, and uses the file."""
    program = compiled(tmp_path / "containerd", CONTAINERD)
    started = []

    def run(text, *, folder="etc", prefix=()):
        file = tmp_path / folder / "containerd.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        process = subprocess.Popen([*prefix, program, "--config", file])
        started.append(process)
        while Path(f"/proc/{process.pid}/comm").read_text() != "containerd\n":
            time.sleep(0.01)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def unpacks(facts):
    """Return the values of those containerds that these tests started."""
    plugins = [one.config.get("plugins", {}) for one in facts.containerds if one.version == "2.4.2"]
    return [plugin["io.containerd.transfer.v1.local"]["max_concurrent_unpacks"] for plugin in plugins]


def test_each_containerd_is_asked_by_its_own_program_and_file(start):
    start(CONFIG.format(4), folder="a")
    start(CONFIG.format(5), folder="b")
    assert sorted(unpacks(gather_pull_facts(None))) == [4, 5]


def test_docker_s_own_containerd_is_left_out(start):
    start(CONFIG.format(4), folder="run/docker/containerd")
    assert unpacks(gather_pull_facts(None)) == []


def test_a_file_in_etc_is_not_docker_s():
    class Process:
        def read_words(self):
            return ["containerd", "--config", "/etc/containerd/containerd.toml"]

        def run_program(self, *words):
            return "containerd example 2.4.2 c0ffee" if words == ("--version",) else ""

    process: Any = Process()
    facts = pull_facts._ask_containerd(process, Tree("/"))
    assert facts is not None
    assert (facts.version, facts.file) == ("2.4.2", "/etc/containerd/containerd.toml")


@pytest.mark.parametrize("text", ["no table", "[plugins]\n= 3", "[plugins]\nx = " + "[" * 5000])
def test_what_is_no_configuration_is_left_out(start, text):
    start(text)
    assert unpacks(gather_pull_facts(None)) == []


def test_one_that_does_not_answer_is_left_out(start, monkeypatch, tmp_path):
    monkeypatch.setattr(engine_process, "TIMEOUT_S", 0.2)
    (tmp_path / "etc").mkdir()
    os.mkfifo(tmp_path / "etc/fifo")
    process = start(CONFIG.format(4))
    (tmp_path / "etc/containerd.toml").unlink()
    (tmp_path / "etc/fifo").rename(tmp_path / "etc/containerd.toml")
    assert unpacks(gather_pull_facts(None)) == []
    assert process.poll() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_root_starts_no_program_of_another_user_or_of_a_container(start, tmp_path):
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    start(CONFIG.format(4), prefix=("setpriv", "--reuid=4321", "--clear-groups"))
    start(CONFIG.format(5), prefix=("unshare", "--mount"), folder="container")
    assert unpacks(gather_pull_facts(None)) == []
    start(CONFIG.format(6), folder="own")
    assert unpacks(gather_pull_facts(None)) == [6]


@pytest.fixture
def dockerd(tmp_path):
    """Call it with options to start a program that is called dockerd; it returns the process."""
    program = compiled(tmp_path / "dockerd", "int pause(void); int main(void) { return pause(); }")
    started = []

    def run(*options):
        process = subprocess.Popen([program, *options])
        started.append(process)
        while Path(f"/proc/{process.pid}/comm").read_text() != "dockerd\n":
            time.sleep(0.01)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def gather_docker():
    return gather_pull_facts(DockerFacts(version="29.7.0", containerd_store=True)).docker


@pytest.mark.parametrize(
    ("options", "file", "expected"),
    [
        ([], {}, None),
        ([], {"max-concurrent-downloads": 9}, 9),
        ([], {"max-concurrent-downloads": 0}, None),  # dockerd takes it for absent
        (["--max-concurrent-downloads=0"], {}, 0),
        (["--max-concurrent-downloads=7"], {"max-concurrent-downloads": 9}, 7),
        (["--max-concurrent-downloads", "7"], {}, 7),
        ([], {"max-concurrent-downloads": "many"}, None),
        ([], {"max-concurrent-downloads": -1}, None),
    ],
)
def test_docker_s_limit_is_in_its_command_line_or_its_file(
    monkeypatch, dockerd, tmp_path, options, file, expected
):
    (tmp_path / "daemon.json").write_text(json.dumps(file))
    process = dockerd("--config-file", str(tmp_path / "daemon.json"), *options)
    monkeypatch.setattr(endpoint, "get_listener_pid", lambda _: process.pid)
    assert gather_docker() == DockerFacts(version="29.7.0", containerd_store=True, downloads=expected)


@pytest.mark.parametrize("text", ["{", '["no object"]', "[" * 9000, "{}" + " " * (1 << 20)])
def test_a_file_that_cannot_be_read_leaves_the_limit_unknown(monkeypatch, dockerd, tmp_path, text):
    (tmp_path / "daemon.json").write_text(text)
    process = dockerd("--config-file", str(tmp_path / "daemon.json"))
    monkeypatch.setattr(endpoint, "get_listener_pid", lambda _: process.pid)
    assert gather_docker().is_configured_here is False


@pytest.mark.parametrize("text", [None, "", "\n"])
def test_no_file_and_an_empty_one_set_nothing(monkeypatch, dockerd, tmp_path, text):
    if text is not None:
        (tmp_path / "daemon.json").write_text(text)
    process = dockerd("--config-file", str(tmp_path / "daemon.json"))
    monkeypatch.setattr(endpoint, "get_listener_pid", lambda _: process.pid)
    assert gather_docker() == DockerFacts(version="29.7.0", containerd_store=True)


def test_no_pipe_is_opened_and_no_file_of_an_unknown_folder(monkeypatch, dockerd, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "daemon.json").write_text("{}")
    for file in (str(tmp_path / "pipe"), "daemon.json"):
        process = dockerd("--config-file", file)
        monkeypatch.setattr(endpoint, "get_listener_pid", lambda _, pid=process.pid: pid)
        assert gather_docker().is_configured_here is False


def test_the_settings_of_another_user_s_daemon_are_not_read(monkeypatch, dockerd, tmp_path):
    (tmp_path / "daemon.json").write_text("{}")
    process = dockerd("--config-file", str(tmp_path / "daemon.json"))
    monkeypatch.setattr(endpoint, "get_listener_pid", lambda _: process.pid)
    assert gather_docker().is_configured_here is True
    for users in ([4321], [os.geteuid(), 4321]):
        monkeypatch.setattr(EngineProcess, "read_users", lambda _, users=users: frozenset(users))
        assert gather_docker().is_configured_here is False


def test_a_daemon_of_an_ordinary_user_has_a_file_of_its_own(monkeypatch, dockerd, tmp_path):
    process = dockerd()
    monkeypatch.setattr(endpoint, "get_listener_pid", lambda _: process.pid)
    monkeypatch.setattr(EngineProcess, "read_users", lambda _: frozenset([4321]))
    assert gather_docker().is_configured_here is False
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/daemon.json").write_text('{"max-concurrent-downloads": 9}')
    assert gather_docker().downloads == 9


def test_a_daemon_for_which_systemd_listens_is_found(monkeypatch, dockerd):
    """Its socket tells only who began to listen."""
    process = dockerd("-H", "fd://", "--max-concurrent-downloads=9")
    others = [pid for pid in engine_process.read_command_lines("dockerd") if pid != process.pid]
    monkeypatch.setattr(endpoint, "get_listener_pid", lambda _: os.getpid())
    trusted = engine_process.find_trusted_processes
    monkeypatch.setattr(
        engine_process,
        "find_trusted_processes",
        lambda name: (one for one in trusted(name) if one.pid not in others),
    )
    assert gather_docker() == DockerFacts(version="29.7.0", containerd_store=True, downloads=9)
    dockerd("--max-concurrent-downloads=8")
    assert gather_docker().is_configured_here is False


def test_a_docker_on_another_machine_is_left_out(monkeypatch):
    monkeypatch.setattr(endpoint, "get_listener_pid", lambda _: None)
    assert gather_pull_facts(DockerFacts(version="29.7.0", containerd_store=True)).docker is None


@pytest.fixture
def podman(tmp_path, monkeypatch):
    """Put a podman on PATH, which only tells its version; no file of this machine applies."""
    program = tmp_path / "bin/podman"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho podman version 5.8.6\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("CONTAINERS_CONF", str(tmp_path / "containers.conf"))
    monkeypatch.delenv("CONTAINERS_CONF_OVERRIDE", raising=False)
    return program


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[engine]\nimage_parallel_copies = 20\n", 20),
        ("[engine]\n", None),
        ("engine = 3\n", None),
        ('[engine]\nimage_parallel_copies = "x"\n', None),
        ("[engine\n", None),
    ],
)
@pytest.mark.usefixtures("podman")
def test_podman_s_copies_are_in_its_settings(tmp_path, monkeypatch, text, expected):
    (tmp_path / "containers.conf").write_text(text)
    assert gather_pull_facts(None).podman == PodmanFacts(version="5.8.6", copies=expected)
    (tmp_path / "over.conf").write_text("[engine]\nimage_parallel_copies = 30\n")
    monkeypatch.setenv("CONTAINERS_CONF_OVERRIDE", str(tmp_path / "over.conf"))
    assert gather_pull_facts(None).podman.copies == 30


def test_the_files_of_podman_are_read_in_its_order(monkeypatch, tmp_path):
    monkeypatch.delenv("CONTAINERS_CONF", raising=False)
    monkeypatch.delenv("CONTAINERS_CONF_OVERRIDE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (tmp_path / "containers/containers.conf.d").mkdir(parents=True)
    for name in ("20.conf", "10.conf", "not"):
        (tmp_path / "containers/containers.conf.d" / name).touch()
    own = [
        str(path.relative_to(tmp_path / "containers"))
        for path in pull_facts._list_podman_files()
        if path.is_relative_to(tmp_path)
    ]
    assert own == ["containers.conf", "containers.conf.d/10.conf", "containers.conf.d/20.conf"]


@pytest.mark.usefixtures("podman")
def test_a_pipe_is_no_file_of_podman(tmp_path):
    os.mkfifo(tmp_path / "containers.conf")
    assert gather_pull_facts(None).podman == PodmanFacts(version="5.8.6")


def test_a_user_without_a_home_has_no_files_of_settings(monkeypatch):
    for name in ("CONTAINERS_CONF", "CONTAINERS_CONF_OVERRIDE", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    folders = {path.parts[1] for path in pull_facts._list_podman_files()}
    assert folders <= {"usr", "etc"}
    assert pull_facts._find_daemon_file(54321) is None


def test_a_podman_that_cannot_be_started_is_left_out(podman):
    podman.write_bytes(b"\x7fELF")
    assert gather_pull_facts(None).podman is None
