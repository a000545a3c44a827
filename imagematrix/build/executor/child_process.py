"""Processes that end with this one, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
from typing import TextIO, cast

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def start_child(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a command in a process group of its own, with its output in one pipe.

    Its input is empty, and stays open until `wait_for_child`. If this process ends before, even by SIGKILL,
    the kernel kills the group: that is what it does with the signal of an input that becomes readable. A
    parent-death signal would need code between fork and exec, which is unsafe with other threads.
    """
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            command,
            stdin=reader,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
        with contextlib.suppress(OSError):  # it has ended already
            fcntl.fcntl(reader, fcntl.F_SETOWN, -process.pid)
            fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)
    except BaseException:
        os.close(writer)
        raise
    finally:
        os.close(reader)
    process.stdin = cast("TextIO", os.fdopen(writer, "w"))
    return process


def wait_for_child(process: subprocess.Popen[str]) -> int:
    """Wait until a process that `start_child` returned has ended, and return its exit code."""
    assert process.stdin is not None  # noqa: S101 - pipes; for the type checker
    assert process.stdout is not None  # noqa: S101
    process.stdout.close()
    code = process.wait()
    process.stdin.close()
    return code


def signal_child(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal to the group: buildx starts programs for logins and for engines behind ssh."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
