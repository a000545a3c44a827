"""The report of the GPU checks, and their termination. The checks are tested in the engine tests."""

import importlib
import json
import platform
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BUNDLE = ROOT / "ci/gpu_bundle"
UUID = "GPU-5f3c1a2b-0d4e-4f6a-8b9c-112233445566"


@pytest.fixture
def module(monkeypatch):
    """Call it with a name to get a module of the bundle, which is outside the package."""
    monkeypatch.syspath_prepend(BUNDLE)
    monkeypatch.syspath_prepend(BUNDLE / "checks")
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BUNDLE)):
            del sys.modules[name]


@pytest.fixture
def machine(module, tmp_path):
    about = {"made": "2026-11-21", "commit": "abc", "kernels": None, "lacking": {"runc": "no apt-get here"}}
    (tmp_path / "about.json").write_text(json.dumps(about))
    (tmp_path / "work").mkdir()
    return module("machine").Machine(tmp_path, tmp_path / "work", 1)


def test_report_does_not_identify_the_machine(module, machine, monkeypatch):
    report = module("report")
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.lab.example")
    monkeypatch.setattr(platform, "node", lambda: "node17")
    monkeypatch.setenv("HOME", "/home/jo")
    evidence = (
        f"<uuid>{UUID}</uuid> <serial>1652922003123</serial> Serial Number : 1652922003124\n"
        f"node17 node17.lab.example node171 /home/jo/x {machine.work}/y {UUID} MIG-{UUID[4:]}\n"
    )
    text = report.written(
        machine, report.Mask(machine), [report.Result("Root", "x|y", "FAILED", "a|b", evidence)], 1
    )
    assert "<uuid>GPU-#1</uuid> <serial>#</serial> Serial Number : #" in text
    assert "HOST HOST node171 ~/x WORK/y GPU-#1 MIG-#2" in text
    assert "| a\\|b |" in text
    assert "1 FAILED." in text


def test_evidence_is_a_short_code_block(module, machine):
    report = module("report")
    evidence = "\n".join(["```", *map(str, range(1000)), "x" * 5000])
    text = report.written(
        machine, report.Mask(machine), [report.Result("Root", "n", "passed", "", evidence)], 1
    )
    assert text.count("```") == 2
    assert len(text) < 4000


def ended(stat):
    """Whether a process has ended, by its file in /proc."""
    try:
        return ") Z " in stat.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_processes_of_a_check_end_with_it(module, machine):
    errors = module("machine")
    with machine.start("sh", "-c", "sleep 600 & echo $!; wait") as process:
        stat = Path(f"/proc/{process.stdout.readline().strip()}/stat")
        assert stat.exists()
    until = time.monotonic() + 60  # it has been killed, and ends when a CPU is free
    while not ended(stat):
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(errors.FailedError, match="`sleep` did not end within"):
        machine.run("sleep", "600", limit=0.1)
    with pytest.raises(errors.FailedError, match="`/no/such` can't be started: No such file"):
        machine.run("/no/such")


def test_failed_part_of_the_bundle_gives_a_reason(module, monkeypatch, tmp_path):
    parts = module("parts")
    for name in ("dpkg", "gcc", "apt-get"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'E: Temporary failure resolving' >&2\nexit 100\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "cache").mkdir()
    with pytest.raises(parts.LackingError, match="apt-get install failed: E: Temporary failure"):
        parts.runtime(tmp_path, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
    with pytest.raises(parts.LackingError, match=r"no g\+\+"):
        parts.program(tmp_path)
    with pytest.raises(parts.LackingError, match=r"no g\+\+"):
        parts.kernels(tmp_path, tmp_path / "cache")


def test_gpu_check_fails_without_a_gpu_unless_if_any(tmp_path):
    if Path("/dev/nvidia0").exists() or Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has a GPU")
    (tmp_path / "ci").mkdir()
    shutil.copy(ROOT / "ci/gpu-check", tmp_path / "ci")
    for words, code in (((), 1), (("if-any",), 0)):
        done = subprocess.run(
            [tmp_path / "ci/gpu-check", *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == code
        assert "this machine has no NVIDIA GPU" in done.stderr
