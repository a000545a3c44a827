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
    daemon = None
    ancestor = pid or os.getpid()
    while ancestor > 1:
        try:
            with Path(proc, str(ancestor), "status").open(encoding="utf-8", errors="replace") as file:
                fields = dict(line.partition(":\t")[::2] for line in file.read(LIMIT).splitlines())
            name, parent = fields["Name"], int(fields["PPid"])
        except (OSError, KeyError, ValueError):  # it has ended, or this user may not see it
            break
        if name == DAEMON:
            daemon = ancestor
        ancestor = parent
    return daemon
