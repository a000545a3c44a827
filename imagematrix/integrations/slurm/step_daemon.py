"""The step of Slurm that a process is in."""

from __future__ import annotations

import os
from pathlib import Path

DAEMON = "slurmstepd"
LIMIT = 4096  # bytes of a process's status


def find_step_daemon(pid: int | None = None, proc: str = "/proc") -> int | None:
    """Return the PID of the slurmstepd that a process, by default this one, descends from, None without one.

    A task has the name of the daemon, too, until it executes its program; the daemon is the ancestor of all.
    """
    found = None
    here = pid or os.getpid()
    while here > 1:
        name, parent = _read_status(here, proc)
        if name == DAEMON:
            found = here
        here = parent
    return found


def _read_status(pid: int, proc: str) -> tuple[str, int]:
    """Return the name of a process and the PID of its parent, 0 if this user may not see it."""
    try:
        with Path(proc, str(pid), "status").open(encoding="utf-8", errors="replace") as file:
            fields = dict(line.partition(":\t")[::2] for line in file.read(LIMIT).splitlines())
        return fields["Name"], int(fields["PPid"])
    except (OSError, KeyError, ValueError):
        return "", 0
