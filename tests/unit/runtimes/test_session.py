"""A runtime in a session of its own: exit codes, and signals for the container."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from imagematrix.runtimes import session

SHELL = {"PATH": os.environ["PATH"]}
RUN = """\
import os, sys
from imagematrix.runtimes import session
sys.exit(session.run(sys.argv[1:], os.environ))
"""


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -KILL $$", 137), ("true", 0)])
def test_the_exit_code_is_the_command_s(script, code):
    assert session.run(["sh", "-c", script], SHELL) == code


def test_a_command_that_cannot_be_started_is_an_error():
    with pytest.raises(FileNotFoundError):
        session.run(["/nowhere/program"], SHELL)


@pytest.fixture
def started():
    """Call it with a script to start it in another process that runs `session.run`."""
    processes = []

    def start(script):
        words = [sys.executable, "-c", RUN, "sh", "-c", script]
        processes.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True))
        assert processes[-1].stdout.readline() == "ready\n"
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("whole_group", [True, False])
def test_a_signal_reaches_the_command_once(started, whole_group):
    process = started("trap 'echo got' TERM; trap 'exit 5' USR1; echo ready; while :; do sleep 0.05; done")
    send = os.killpg if whole_group else os.kill
    send(process.pid, signal.SIGTERM)
    assert process.stdout.readline() == "got\n"
    send(process.pid, signal.SIGUSR1)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (5, "")


def test_a_stop_from_the_terminal_stops_nothing(started):
    process = started("trap 'exit 5' TERM; echo ready; while :; do sleep 0.05; done")
    os.kill(process.pid, signal.SIGTSTP)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 5


def test_the_command_ends_with_this_process(started, tmp_path):
    process = started(f"echo ready; echo $$ > {tmp_path}/pid; exec sleep 60")
    path = tmp_path / "pid"
    while not path.exists() or not path.read_text():
        time.sleep(0.01)
    process.kill()
    process.communicate(timeout=30)  # its output ends with the command
    deadline = time.monotonic() + 30
    while Path(f"/proc/{path.read_text().strip()}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
