"""Usage of GPUs by processes: from NVML, or from the open device nodes in /proc where NVML lists none."""
# os scans /proc faster than pathlib does.
# ruff: noqa: PTH116, PTH123, PTH208

from __future__ import annotations

import contextlib
import os
import re

from imagematrix.allocation.usage import Consumer, combined, mig_key
from imagematrix.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from imagematrix.allocation.usage import Usage
    from imagematrix.node.nvml import Nvml, Process

__all__ = ["MAJOR", "computing", "container_ids", "describe", "with_open_nodes"]

MAJOR = 195  # of /dev/nvidia*: see the kernel's list of device numbers (admin-guide/devices.txt)
# The id in the cgroup names of any engine: docker-ID.scope, libpod-ID.scope, /docker/ID.
CONTAINER = re.compile(r"[0-9a-f]{64}")
# Daemons and monitors that open GPUs but compute nothing. /proc/PID/comm has at most 15 characters.
WATCHERS = frozenset({"nvidia-persiste", "nvidia-smi", "nv-hostengine", "dcgm-exporter", "nvidia-powerd"})


def computing(nvml: Nvml) -> tuple[Usage, frozenset[int]]:
    """Return the usage by compute processes, and the minors of the GPUs whose processes NVML listed."""
    usages, covered = [], set()
    for gpu in nvml.gpus:
        if gpu.minor is not None and gpu.processes is not None:
            covered.add(gpu.minor)
            usages += [{_key(gpu.minor, process): (_process(process.pid),)} for process in gpu.processes]
    return combined(*usages), frozenset(covered)


def with_open_nodes(minors: Collection[int], proc: str = "/proc") -> Usage:
    """Return the usage by processes that have a GPU's node open, as far as this user may read /proc.

    A program opens the nodes of all GPUs that it could use, so this reports more than NVML would.
    """
    devices = {os.makedev(MAJOR, minor): f"nvidia{minor}" for minor in minors}
    return with_open_devices(devices, proc)


def with_open_devices(keys: Mapping[int, str], proc: str = "/proc") -> Usage:
    """Return the usage by processes that have a device open; `keys` maps device numbers to keys."""
    usages = []
    for pid in (int(name) for name in os.listdir(proc) if name.isdecimal()):
        numbers = keys.keys() & set(_devices(f"{proc}/{pid}/fd"))
        if numbers and (process := _process(pid, proc)).name not in WATCHERS:
            usages += [{keys[number]: (process,)} for number in sorted(numbers)]
    return combined(*usages)


def describe(pid: int, proc: str = "/proc", *, kind: str = "process") -> Consumer:
    """Return a process with its command and user, as far as they can be read."""
    name, user = "", None
    with contextlib.suppress(OSError):
        with open(f"{proc}/{pid}/comm", encoding="utf-8", errors="replace") as file:
            name = " ".join(file.read().split())  # a process can set any name, even with line breaks
        user = _user(os.stat(f"{proc}/{pid}").st_uid)
    return Consumer(kind=kind, name=name or "unknown", pid=pid, user=user)


def container_ids(pid: int, proc: str = "/proc") -> frozenset[str]:
    """Return the ids of the containers that a process runs in."""
    try:
        with open(f"{proc}/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            return frozenset(CONTAINER.findall(file.read()))
    except OSError:
        return frozenset()


def _process(pid: int, proc: str = "/proc") -> Consumer:
    """Return a process, marked with the containers that it runs in."""
    return replace(describe(pid, proc), marks=container_ids(pid, proc))


def _key(minor: int, process: Process) -> str:
    if process.gpu_instance is None or process.compute_instance is None:
        return f"nvidia{minor}"
    return mig_key(minor, process.gpu_instance, process.compute_instance)


def _devices(folder: str) -> Iterable[int]:
    try:
        names = os.listdir(folder)
    except OSError:  # owned by another user, or ended
        return
    for name in names:
        try:  # noqa: SIM105 - thousands of times, where each suppress() takes as long as the call
            yield os.stat(f"{folder}/{name}").st_rdev
        except OSError:
            pass


def _user(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
