"""The engine's file: replaced atomically, and unchanged after an error."""

import stat
from pathlib import Path

import pytest

from imagematrix.errors import UsageError
from imagematrix.integrations.swarm import engine_file
from imagematrix.integrations.swarm.engine_file import EngineDaemon


@pytest.fixture
def dockerd(tmp_path, monkeypatch):
    """A dockerd that runs these lines, and the only program on PATH besides a shell's own."""

    def make(*lines):
        program = tmp_path / "bin" / "dockerd"
        program.parent.mkdir(exist_ok=True)
        program.write_text("\n".join(["#!/bin/sh", *lines]))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent))

    return make


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "etc" / "daemon.json"
    path.parent.mkdir()
    path.write_text('{"debug": true}\n')
    path.chmod(0o640)
    return path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_valid_file_replaces_the_other(dockerd, file):
    dockerd('[ "$1 $2" = "--validate --config-file" ] && [ -s "$3" ]')
    engine_file.write_engine_file(file, "{}\n", pytest.fail)
    assert file.read_text() == "{}\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert file.with_name("daemon.json.bak").read_text() == '{"debug": true}\n'
    assert names(file.parent) == ["daemon.json", "daemon.json.bak"]


def test_a_new_file(dockerd, tmp_path):
    dockerd("exit 0")
    file = tmp_path / "new" / "daemon.json"
    engine_file.write_engine_file(file, "{}\n", pytest.fail)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert names(file.parent) == ["daemon.json"]


def test_a_link_stays_a_link(dockerd, file, tmp_path):
    dockerd("exit 0")
    link = tmp_path / "daemon.json"
    link.symlink_to(file)
    engine_file.write_engine_file(link, "{}\n", pytest.fail)
    assert link.is_symlink()
    assert file.read_text() == "{}\n"


def test_a_file_that_dockerd_refuses_is_not_written(dockerd, file):
    dockerd('echo "unable to configure: file $3: no such key" >&2', "exit 1")
    with pytest.raises(UsageError) as caught:
        engine_file.write_engine_file(file, "{}\n", pytest.fail)
    assert str(caught.value) == f"{file} would be invalid: unable to configure: file {file}: no such key"
    assert file.read_text() == '{"debug": true}\n'
    assert names(file.parent) == ["daemon.json"]


def test_dockerd_cannot_validate(dockerd, file, tmp_path, monkeypatch):
    reasons: list[str] = []
    dockerd('echo "unknown flag: --validate" >&2', "exit 125")
    engine_file.write_engine_file(file, "{}\n", reasons.append)
    monkeypatch.setenv("PATH", str(tmp_path))
    engine_file.write_engine_file(file, "{}\n", reasons.append)
    dockerd("sleep() { while :; do :; done; }", "sleep")
    monkeypatch.setattr(engine_file, "VALIDATE_S", 0.1)
    engine_file.write_engine_file(file, "{}\n", reasons.append)
    assert reasons == [
        "this dockerd cannot validate a file",
        "dockerd not found",
        "`dockerd --validate` took over 0.1 seconds",
    ]
    assert file.read_text() == "{}\n"


def test_a_file_that_cannot_be_written(dockerd, tmp_path):
    dockerd("exit 0")
    (tmp_path / "etc").write_text("")
    with pytest.raises(UsageError, match=r"daemon\.json cannot be written"):
        engine_file.write_engine_file(tmp_path / "etc" / "daemon.json", "{}", pytest.fail)


def test_a_file_that_cannot_be_read(file):
    assert engine_file.read_engine_file(file.with_name("other")) == ""
    file.write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"daemon\.json cannot be read"):
        engine_file.read_engine_file(file)
    assert engine_file.read_bytes(file) == b"\xff"
    assert engine_file.read_bytes(file.parent) is None


@pytest.mark.parametrize(("text", "blanks"), [("", 2), ('{"a": 1}', 2), ('{\n    "a": {\n        "b": 1', 4)])
def test_the_indentation_of_a_file(text, blanks):
    assert engine_file.get_indent(text) == blanks


class TestEngine:
    """The engine that runs with a file."""

    FILE = Path("/etc/docker/daemon.json")

    def test_its_flags(self):
        words = ["/usr/sbin/dockerd", "-H", "fd://", "--containerd=/run/c.sock", "--debug", "--label", "a=b"]
        engine = engine_file.find_daemon(self.FILE, {99: words})
        assert engine.flags == (
            ("H", "fd://"),
            ("containerd", "/run/c.sock"),
            ("debug", "true"),
            ("label", "a=b"),
        )

    def test_another_file_is_another_engine(self, tmp_path):
        commands = {99: ["dockerd", "--label", "a=b", "--config-file", str(tmp_path / "daemon.json")]}
        assert engine_file.find_daemon(self.FILE, commands) == EngineDaemon()
        assert engine_file.find_daemon(tmp_path / "daemon.json", commands).get_values("label") == ["a=b"]

    def test_several_with_one_file_are_an_error(self):
        commands = {999: ["dockerd"], 1000: ["dockerd", "-D"], 1001: ["dockerd", "--config-file=/x"]}
        with pytest.raises(UsageError, match=r"several engines use /etc/docker/daemon\.json: .* 999, 1000$"):
            engine_file.find_daemon(self.FILE, commands)

    def test_flags_that_conflict(self):
        engine = EngineDaemon(flags=(("label", "a=b"), ("node-generic-resource", "gpu=1")))
        with pytest.raises(UsageError, match="started with --label, --node-generic-resource, and refuses"):
            engine.refuse_flags(("label", "node-generic-resource", "add-runtime"))
        engine.refuse_flags(("default-runtime",))

    @pytest.mark.parametrize(
        ("flags", "config", "folder"),
        [
            ((), {}, "/var/lib/docker"),
            ((), {"data-root": "/data"}, "/data"),
            ((("data-root", "/data"),), {}, "/data"),
            ((("g", "/data"),), {}, "/data"),
        ],
    )
    def test_its_data(self, flags, config, folder):
        assert EngineDaemon(flags=flags).get_data_root(config) == folder

    @pytest.mark.parametrize(
        ("flags", "config", "address"),
        [
            ((), {}, "unix:///var/run/docker.sock"),
            ((("H", "fd://"),), {}, "unix:///var/run/docker.sock"),
            ((("host", "tcp://0.0.0.0:2376"), ("H", "unix:///run/d.sock")), {}, "unix:///run/d.sock"),
            ((), {"hosts": ["unix:///run/d.sock"]}, "unix:///run/d.sock"),
        ],
    )
    def test_its_socket(self, flags, config, address):
        assert EngineDaemon(flags=flags).get_address(config) == address

    def test_without_a_socket(self):
        with pytest.raises(UsageError, match="no local socket"):
            EngineDaemon(flags=(("host", "tcp://0.0.0.0:2376"),)).get_address({})
