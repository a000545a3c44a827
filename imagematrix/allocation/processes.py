"""Which processes use the GPUs: as NVML says, or, where it says nothing, who has their nodes open."""
# One look at /proc costs little with os alone.
# ruff: noqa: PTH116, PTH123, PTH208

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import replace

from imagematrix.allocation.usage import Use, joined, mig_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from imagematrix.allocation.usage import Uses
    from imagematrix.node.nvml import Nvml, Process

__all__ = ["MAJOR", "computing", "containers", "describe", "opened"]

MAJOR = 195  # of /dev/nvidia0 and on, in the kernel's list of device numbers (admin-guide/devices.txt)
# In the names of a container's cgroups, whoever made them: docker-ID.scope, libpod-ID.scope, /docker/ID.
CONTAINER = re.compile(r"[0-9a-f]{64}")
# They keep GPUs awake, or look at them, and compute nothing. /proc/PID/comm has 15 characters.
WATCHERS = frozenset({"nvidia-persiste", "nvidia-smi", "nv-hostengine", "dcgm-exporter", "nvidia-powerd"})


def computing(answer: Nvml) -> tuple[Uses, frozenset[int]]:
    """Return the uses by processes that compute, and the minors of the GPUs that NVML told them of."""
    found, told = [], set()
    for gpu in answer.gpus:
        if gpu.minor is not None and gpu.processes is not None:
            told.add(gpu.minor)
            found += [{_key(gpu.minor, process): (_process(process.pid),)} for process in gpu.processes]
    return joined(*found), frozenset(told)


def opened(minors: Collection[int], proc: str = "/proc") -> Uses:
    """Return the uses by processes that have the node of a GPU open, as far as this user may see.

    A program opens the nodes of all GPUs that it could use, so this says more than NVML would.
    """
    numbers = {os.makedev(MAJOR, minor): f"nvidia{minor}" for minor in minors}
    return held_open(numbers, proc)


def held_open(numbers: Mapping[int, str], proc: str = "/proc") -> Uses:
    """Return the uses by processes that have a device open, given the keys by device number."""
    found = []
    for pid in (int(name) for name in os.listdir(proc) if name.isdecimal()):
        open_here = numbers.keys() & set(_devices(f"{proc}/{pid}/fd"))
        if open_here and (use := _process(pid, proc)).name not in WATCHERS:
            found += [{numbers[number]: (use,)} for number in sorted(open_here)]
    return joined(*found)


def describe(pid: int, proc: str = "/proc", *, kind: str = "process") -> Use:
    """Return what to call a process: its command and its user, as far as they are there to be read."""
    name, user = "", None
    with contextlib.suppress(OSError):
        with open(f"{proc}/{pid}/comm", encoding="utf-8", errors="replace") as file:
            name = " ".join(file.read().split())  # any, lines included, if the process wants
        user = _user(os.stat(f"{proc}/{pid}").st_uid)
    return Use(kind=kind, name=name or "unknown", pid=pid, user=user)


def containers(pid: int, proc: str = "/proc") -> frozenset[str]:
    """Return the ids of the containers that a process runs in."""
    try:
        with open(f"{proc}/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            return frozenset(CONTAINER.findall(file.read()))
    except OSError:
        return frozenset()


def _process(pid: int, proc: str = "/proc") -> Use:
    """Return the use by a process, marked with the containers that it runs in."""
    return replace(describe(pid, proc), marks=containers(pid, proc))


def _key(minor: int, process: Process) -> str:
    if process.gpu_instance is None or process.compute_instance is None:
        return f"nvidia{minor}"
    return mig_key(minor, process.gpu_instance, process.compute_instance)


def _devices(folder: str) -> Iterable[int]:
    try:
        names = os.listdir(folder)
    except OSError:  # another user's, or gone
        return
    for name in names:
        with contextlib.suppress(OSError):
            yield os.stat(f"{folder}/{name}").st_rdev


def _user(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
