"""Access to a device, checked without opening it.

nvidia.ko initialises a GPU when its node is opened, with O_NONBLOCK after the call has returned
(nvidia_open() in nv.c of NVIDIA's open GPU kernel modules). A successful open therefore proves little, and
without persistence mode it costs an initialisation.
"""
# pathlib costs more to import than a whole probe takes.
# ruff: noqa: PTH116, PTH123

from __future__ import annotations

import errno
import os

__all__ = ["require"]

DRIVERS = "/proc/devices"  # the major numbers that drivers have registered


def require(path: str) -> None:
    """Raise the OSError with which the kernel denies access to the character device `path`.

    access(2) covers the file's mode, ACLs and the devices cgroup (inode_permission() in fs/namei.c).
    """
    if not os.access(path, os.R_OK | os.W_OK, effective_ids=True):
        # open(2) fails at the same check, before it calls the driver, and reports the reason.
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    elif not _has_driver(os.major(os.stat(path).st_rdev)):
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), path)


def _has_driver(major: int) -> bool:
    """Whether a driver has registered a major number for character devices; true if that is unknown."""
    try:
        with open(DRIVERS, encoding="ascii", errors="replace") as file:
            listed = file.read().partition("Block devices:")[0]
    except OSError:
        return True
    return any(line.split()[:1] == [str(major)] for line in listed.splitlines())
