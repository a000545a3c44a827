"""A filter of system calls, as systemd's SystemCallFilter= installs it before it starts a service.

Call `filter_command` for the prefix of a command that is then started with such a filter.
"""

import ctypes
import errno
import json
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

LIBRARY = "libseccomp.so.2"
ALLOW, FAIL = 0x7FFF0000, 0x00050000 | errno.EPERM  # SCMP_ACT_ALLOW, SCMP_ACT_ERRNO
RESOURCES = ("nice", "setpriority", "setrlimit", "prlimit64", "sched_setaffinity", "ioprio_set")


def filter_command(*, allowed: Sequence[str] | None = None, denied: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the words before a command for which these system calls fail, or all that are not allowed."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        pytest.skip("libseccomp is not installed")
    return (sys.executable, __file__, json.dumps({"allowed": allowed, "denied": list(denied)}))


def expand_groups(*names: str) -> set[str]:
    """Return the system calls in systemd's groups of these names."""
    found: set[str] = set()
    for name in names:
        said = subprocess.run(
            ["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True
        ).stdout
        words = {line.strip() for line in said.splitlines()[1:] if line.startswith(" ")}
        words = {word for word in words if not word.startswith("#")}
        found |= {word for word in words if not word.startswith("@")}
        found |= expand_groups(*(word for word in words if word.startswith("@")))
    return found


def load_filter(allowed: Sequence[str] | None, denied: Sequence[str]) -> None:
    """Install the filter in this process."""
    library = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(ALLOW if allowed is None else FAIL)))
    for action, names in ((ALLOW, allowed or ()), (FAIL, denied)):
        for name in names:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number >= 0:  # this architecture has it
                library.seccomp_rule_add(context, ctypes.c_uint32(action), number, 0)
    if library.seccomp_load(context):
        raise OSError("the filter cannot be loaded")


if __name__ == "__main__":
    _, filters, *command = sys.argv
    load_filter(**json.loads(filters))
    os.execvp(command[0], command)  # noqa: S606 - it gets the filter
