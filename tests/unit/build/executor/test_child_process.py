"""Processes that end with the one that started them, even if it is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from imagematrix.build.executor import child_process

STARTER = """
import sys
from imagematrix.build.executor import child_process
process = child_process.start_child(["sh", "-c", sys.argv[1]], {})
print(process.stdout.readline(), end="", flush=True)
process.wait()
"""


def test_a_group_ends_when_its_starter_is_killed(tmp_path):
    """Neither the command, which ignores SIGTERM, nor the program that it started keeps the fifo open."""
    os.mkfifo(tmp_path / "open")
    command = f"trap '' TERM; exec 3>{tmp_path}/open; sleep 1000 & echo begun; wait"
    starter = subprocess.Popen([sys.executable, "-c", STARTER, command], stdout=subprocess.PIPE)
    with (tmp_path / "open").open() as fifo, starter:
        assert starter.stdout.readline() == b"begun\n"
        starter.kill()
        assert not fifo.read()


def test_a_command_has_an_empty_input_and_its_code_is_returned():
    process = child_process.start_child(["sh", "-c", "echo out; echo err >&2; exit 3"], {})
    assert process.stdout.read() == "out\nerr\n"
    assert child_process.wait_for_child(process) == 3
    assert process.stdin.closed


def opened():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_descriptors_of_a_command_that_cannot_start_are_closed(tmp_path):
    before = opened()
    with pytest.raises(FileNotFoundError):
        child_process.start_child([str(tmp_path / "none")], {})
    assert opened() == before


def test_a_signal_to_an_ended_group_is_lost():
    process = child_process.start_child(["true"], {})
    child_process.wait_for_child(process)
    child_process.signal_child(process, signal.SIGTERM)
