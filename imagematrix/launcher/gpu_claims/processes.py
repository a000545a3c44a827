"""Usage of GPUs by processes: from NVML, or from the open device nodes in /proc where NVML lists none."""
# os scans /proc faster than pathlib does.
# ruff: noqa: PTH116, PTH123, PTH208

from __future__ import annotations

import contextlib
import os
import re

from imagematrix.common.record import replace
from imagematrix.images.local_store.holder import read_mount_namespace
from imagematrix.launcher.gpu_claims.usage import Consumer, format_mig_key, merge_usages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from imagematrix.hardware.host.nvml import Nvml
    from imagematrix.launcher.gpu_claims.usage import Usage

MAJOR = 195  # of /dev/nvidia*: see the kernel's list of device numbers (admin-guide/devices.txt)
# The id in the cgroup names of any engine: docker-ID.scope, libpod-ID.scope, /docker/ID.
CONTAINER = re.compile(r"[0-9a-f]{64}")
# The cgroup of all pods, as kubelet's drivers name it, and one in which any user can give any name.
PODS = re.compile(r"/kubepods(?:(?:-[^/]+)?\.slice)?/")
OF_USERS = "/user.slice/"
# Daemons and monitors that open GPUs but compute nothing. /proc/PID/comm has at most 15 characters.
WATCHERS = frozenset({"nvidia-persiste", "nvidia-smi", "nv-hostengine", "dcgm-exporter", "nvidia-powerd"})


def compute_process_usage(nvml: Nvml) -> tuple[Usage, frozenset[int]]:
    """Return the usage by compute processes, and the minors of the GPUs whose processes NVML listed."""
    usages, covered = [], set()
    for gpu in nvml.gpus:
        if gpu.minor is not None and gpu.processes is not None:
            covered.add(gpu.minor)
            for process in gpu.processes:
                key = f"nvidia{gpu.minor}"
                if process.gpu_instance is not None and process.compute_instance is not None:
                    key = format_mig_key(gpu.minor, process.gpu_instance, process.compute_instance)
                usages.append({key: (_make_consumer(process.pid),)})
    return merge_usages(*usages), frozenset(covered)


def compute_open_node_usage(minors: Collection[int], proc: str = "/proc") -> Usage:
    """Return the usage by processes that have a GPU's node open, as far as this user may read /proc.

    A program opens the nodes of all GPUs that it could use, so this reports more than NVML would.
    """
    devices = {os.makedev(MAJOR, minor): f"nvidia{minor}" for minor in minors}
    return compute_open_device_usage(devices, proc)


def compute_open_device_usage(keys: Mapping[int, str], proc: str = "/proc") -> Usage:
    """Return the usage by processes that have a device open; `keys` maps device numbers to keys."""
    usages = []
    for pid in (int(name) for name in os.listdir(proc) if name.isdecimal()):
        opened = keys.keys() & set(_list_open_devices(f"{proc}/{pid}/fd"))
        if opened and (process := _make_consumer(pid, proc)).name not in WATCHERS:
            usages += [{keys[device]: (process,)} for device in sorted(opened)]
    return merge_usages(*usages)


def describe_process(pid: int, proc: str = "/proc", *, kind: str = "process") -> Consumer:
    """Return a process with its command and user, as far as they can be read."""
    # A process can set any name, even with line breaks.
    name = " ".join(word for line in read_proc_lines(f"{proc}/{pid}/comm") for word in line.split())
    user = None
    with contextlib.suppress(OSError):
        uid = os.stat(f"{proc}/{pid}").st_uid
        import pwd

        user = str(uid)  # if it is a user of a container, or of another node
        with contextlib.suppress(KeyError):
            user = pwd.getpwuid(uid).pw_name
    return Consumer(kind=kind, name=name or "unknown", pid=pid, user=user)


def find_container_ids(pid: int, proc: str = "/proc") -> frozenset[str]:
    """Return the ids of the containers that a process runs in."""
    return frozenset(CONTAINER.findall(read_cgroup(pid, proc)))


def is_in_pod(pid: int, proc: str = "/proc") -> bool:
    """Whether a process runs in a pod of Kubernetes."""
    path = read_cgroup(pid, proc)
    return PODS.search(path) is not None and OF_USERS not in path


def read_cgroup(pid: int, proc: str = "/proc") -> str:
    """Return the cgroups of a process as the kernel lists them; empty if it has ended."""
    return "\n".join(read_proc_lines(f"{proc}/{pid}/cgroup"))


def read_proc_lines(path: str) -> list[str]:
    """Return the lines of a file in /proc; none if the process has ended, or this user may not read it."""
    try:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            return [line.removesuffix("\n") for line in file]
    except OSError:
        return []


def _make_consumer(pid: int, proc: str = "/proc") -> Consumer:
    """Return a process, with what tells the containers that it runs in: ids, and its mount namespace.

    Without a daemon, a container has no id.
    """
    owner_ids = find_container_ids(pid, proc) | find_mount_namespace(pid, proc)
    return replace(describe_process(pid, proc), owner_ids=owner_ids)


def find_mount_namespace(pid: int, proc: str = "/proc") -> frozenset[str]:
    """Return the mount namespace of a process; none if it is this process's, or this user may not see it."""
    own = read_mount_namespace("self", proc)
    return frozenset({read_mount_namespace(pid, proc)} - {"", own}) if own else frozenset()


def _list_open_devices(folder: str) -> Iterable[int]:
    try:
        names = os.listdir(folder)
    except OSError:  # owned by another user, or ended
        return
    for name in names:
        try:  # noqa: SIM105 - thousands of times, where each suppress() takes as long as the call
            # The entries are links to the open files themselves, whatever the process sees at their paths
            # (proc(5)).
            yield os.stat(f"{folder}/{name}").st_rdev
        except OSError:
            pass
