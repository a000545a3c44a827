"""Device nodes of NVIDIA's driver: access to one, checked without opening it, and how to create one.

nvidia.ko initialises a GPU when its node is opened, with O_NONBLOCK after the call has returned
(nvidia_open() in nv.c of NVIDIA's open GPU kernel modules). A successful open therefore proves little, and
without persistence mode it costs an initialisation.
"""
# pathlib costs more to import than a whole probe takes.
# ruff: noqa: PTH116, PTH123, PTH208

from __future__ import annotations

import errno
import os
import re

from imagematrix.common.text import quote_word

GPU = re.compile(r"nvidia(\d+)", re.ASCII)  # the name of a GPU's node, with its minor
DRIVERS = "/proc/devices"  # the major numbers that drivers have registered

CAPABILITY = "/dev/nvidia-caps/nvidia-cap"
# `nvidia-modprobe -c N` creates the node of minor N and no other; with -u, those of nvidia-uvm.
UVM = "load the module and create the node: `nvidia-modprobe -u -c 0`"
CREATE = {
    "/dev/nvidiactl": "load the driver and create the node: `modprobe nvidia`, `nvidia-modprobe -c 255`",
    "/dev/nvidia-uvm": UVM,
    "/dev/nvidia-uvm-tools": UVM,
    "/dev/nvidia-modeset": "load the module and create the node: `nvidia-modprobe -m`",
}


def explain_creation(path: str) -> str:
    """Return the remedy for a node of NVIDIA's driver that does not exist."""
    if path in CREATE:
        return CREATE[path]
    if path.startswith(CAPABILITY):
        return "create the node: `nvidia-modprobe -f` with its file under /proc/driver/nvidia/capabilities"
    minor = path.removeprefix("/dev/nvidia")
    return f"load the driver and create the node: `modprobe nvidia`, `nvidia-modprobe -c {quote_word(minor)}`"


def require_device(path: str) -> None:
    """Raise the OSError with which the kernel denies access to the character device `path`.

    access(2) covers the file's mode, ACLs and the devices cgroup (inode_permission() in fs/namei.c).
    """
    if not _may_open(path):
        # open(2) fails at the same check, before it calls the driver, and reports the reason.
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    elif not _has_driver(os.major(os.stat(path).st_rdev)):
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), path)


def list_permitted_minors(folder: str) -> tuple[int, ...]:
    """Return the minors of the GPUs' nodes in `folder` that this process may open.

    It is empty if the process may open all of them, so that access says nothing about the GPUs.
    """
    minors = _list_minors(folder)
    openable = tuple(minor for minor in minors if _may_open(f"{folder}/nvidia{minor}"))
    return openable if len(openable) < len(minors) else ()


def is_withheld(folder: str) -> bool:
    """Whether a cgroup denies this process all GPUs' nodes in `folder`.

    A file's mode, which an engine's process need not obey, is another refusal (EACCES).
    """
    minors = _list_minors(folder)
    return bool(minors) and all(_is_denied_by_cgroup(f"{folder}/nvidia{minor}") for minor in minors)


def _list_minors(folder: str) -> list[int]:
    try:
        return sorted(int(match[1]) for name in os.listdir(folder) if (match := GPU.fullmatch(name)))
    except OSError:
        return []


def _is_denied_by_cgroup(path: str) -> bool:
    try:
        require_device(path)
    except OSError as error:
        return error.errno == errno.EPERM
    return False


def _may_open(path: str) -> bool:
    return os.access(path, os.R_OK | os.W_OK, effective_ids=True)


def _has_driver(major: int) -> bool:
    """Whether a driver has registered a major number for character devices; true if that is unknown."""
    try:
        with open(DRIVERS, encoding="ascii", errors="replace") as file:
            listed = file.read().partition("Block devices:")[0]
    except OSError:
        return True
    return any(line.split()[:1] == [str(major)] for line in listed.splitlines())
