"""A container whose keeper is a process of its own, with a shell in place of the container."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from imagematrix.errors import EngineError, UsageError
from imagematrix.launcher.daemonless.watched_container import WatchedContainer

S = 5.0
LASTING = "trap '' TERM; echo $$; exec sleep 60"


def read_all(container):
    pieces = b""
    while (piece := container.read_output(S)) != b"":
        pieces += piece or b""
    return pieces


def run_shell(script, folder):
    """Return a start of a shell that is its own runtime; `files` are in the folder."""

    def start(on_standing):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a keeper passes it on
        with subprocess.Popen(["sh", "-c", f"read go; {script}"], stdin=subprocess.PIPE, text=True) as shell:
            on_standing(os.getpid(), shell.pid, str(folder))
            shell.communicate("go\n")
        return shell.returncode if shell.returncode >= 0 else 128 - shell.returncode

    return start


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "files/upper").mkdir(parents=True)
    return tmp_path


def test_its_output_its_files_and_its_code_are_seen(folder):
    script = f"echo out; echo error >&2; touch {folder}/files/upper/new; exit 7"
    with WatchedContainer(run_shell(script, folder)) as container:
        before = time.monotonic()
        assert sorted(read_all(container).split()) == [b"error", b"out"]
        assert container.wait_for_end() == 7
        assert Path(f"/proc/self/fd/{container.files}/upper/new").exists()
        assert abs(container.started - before) < S


def test_nothing_comes_in_time(folder):
    with WatchedContainer(run_shell("sleep 60", folder)) as container:
        while container.files is None:
            assert container.read_output(S) is None
        assert container.read_output(0.01) is None


def test_it_ends_with_its_context(folder):
    with WatchedContainer(run_shell(LASTING, folder)) as container:
        while not (line := container.read_output(S)):
            pass
    with pytest.raises(ProcessLookupError):
        os.kill(int(line), 0)


def test_one_that_was_ended_is_killed(folder):
    with WatchedContainer(run_shell(LASTING, folder)) as container:
        while not container.read_output(S):
            pass
        container.end()
        assert read_all(container) == b""
        assert container.wait_for_end() != 0


@pytest.mark.parametrize("error", [UsageError("wrong", remedy="right"), EngineError("broken")])
def test_an_error_of_the_start_is_raised_here(error):
    def start(_):
        raise error

    with WatchedContainer(start) as container:
        assert read_all(container) == b""
        with pytest.raises(type(error), match=str(error)) as raised:
            container.wait_for_end()
    assert raised.value.remedy == error.remedy
    assert container.files is None


def test_a_keeper_that_was_killed_is_an_error():
    with WatchedContainer(lambda _: os.kill(os.getpid(), 9) or 0) as container:
        assert read_all(container) == b""
        with pytest.raises(EngineError, match="was killed"):
            container.wait_for_end()
