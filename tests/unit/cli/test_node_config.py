"""`swarm node-config`: one command makes a node offer its GPUs, and reports its changes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HOSTS = Path(__file__).parents[2] / "hosts"


@pytest.fixture
def configure(cli, tmp_path, monkeypatch):
    """Call it with options to configure a node with eight GPUs; its dockerd finds everything valid."""
    for name in ("dockerd", "runc"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    files = (f"--file={tmp_path}/daemon.json", f"--runtime={tmp_path}/runtime")

    def run(*options, host="rome-a100"):
        return cli("swarm", "node-config", *files, f"--host={HOSTS}/{host}.json", *options)

    return run


def test_node_is_configured_once(configure, tmp_path):
    (tmp_path / "daemon.json").write_text('{"debug": true}\n')
    first = configure("--vram", "4G")
    assert first.code == 0
    assert first.err.splitlines() == [
        f"{tmp_path}/runtime is written",
        "restart the engine for the change to take effect: systemctl restart docker",
    ]
    assert '-{"debug": true}' in first.out.splitlines()
    assert '+  "debug": true,' in first.out.splitlines()
    config = json.loads((tmp_path / "daemon.json").read_text())
    assert config["node-generic-resources"][-1] == "VRAM-4G=80"
    assert len(config["node-generic-resources"]) == 9
    assert config["runtimes"] == {"imagematrix": {"path": f"{tmp_path}/runtime"}}
    assert (tmp_path / "runtime").stat().st_mode & 0o111 == 0o111
    again = configure("--vram", "4G")
    assert (again.code, again.out, again.err) == (0, "", f"{tmp_path}/daemon.json is up to date\n")


@pytest.mark.usefixtures("configure")
def test_the_runtime_has_the_same_bytes_in_each_run(tmp_path):
    """Otherwise every run would rewrite it, and report that as a change."""
    written = []
    for seed in ("1", "2"):
        words = ["swarm", "node-config", f"--file={tmp_path}/{seed}.json", f"--runtime={tmp_path}/runtime"]
        words += [f"--host={HOSTS}/rome-a100.json"]
        command = [sys.executable, "-m", "imagematrix", *words]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run(command, env=environment, check=True, capture_output=True)
        written.append((tmp_path / "runtime").read_bytes())
    assert written[0] == written[1]


def test_dry_run_only_shows_the_change(configure, tmp_path):
    shown = configure("--dry-run")
    assert shown.code == 0
    assert '+  "default-runtime": "imagematrix"' in shown.out
    assert shown.err == f"{tmp_path}/runtime would be written\n"
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_unvalidated_configuration_is_reported(configure, tmp_path):
    (tmp_path / "bin/dockerd").write_text("#!/bin/sh\necho unknown flag >&2\nexit 125\n")
    done = configure(host="laptop")
    assert done.code == 0
    assert f"imagematrix: {tmp_path}/daemon.json was not validated: this dockerd cannot" in done.err


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("{", (), "daemon.json: invalid JSON"),
        ("{}", ("--vram", "80G"), "no GPU of this node has 80G of memory"),
        ("{}", ("--vram", "all"), "cannot offer the memory of 8 GPUs as one amount"),
        ('{"hosts": ["tcp://0.0.0.0:1"]}', (), "the engine has no local socket"),
    ],
)
def test_refused_configuration_changes_nothing(configure, tmp_path, text, options, message):
    (tmp_path / "daemon.json").write_text(text)
    configure(*options).refuses(2, message)
    assert (tmp_path / "daemon.json").read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "daemon.json"]
