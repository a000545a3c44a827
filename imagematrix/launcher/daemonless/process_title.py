"""The arguments of this process that `ps` shows."""

from __future__ import annotations

import ctypes

ARGUMENTS = 45  # place of arg_start and arg_end in /proc/PID/stat, after the name (proc_pid_stat(5))
KEPT = 3  # words, such as those of "python -m imagematrix"


def hide_arguments() -> None:
    """Overwrite the arguments of this process: values of variables among them would show as long as it runs.

    The first words stay, so that `ps` shows what it is.
    """
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - pathlib is slow
            words = file.read().rpartition(")")[2].split()
        with open("/proc/self/cmdline", "rb") as file:  # noqa: PTH123
            arguments = file.read().split(b"\0")
    except OSError:
        return
    first, end = map(int, words[ARGUMENTS : ARGUMENTS + 2])
    kept = len(b"\0".join(arguments[:KEPT])) + 1
    if 0 < first < end and kept < end - first:
        ctypes.memset(first + kept, 0, end - first - kept)
