"""Containers of engines other than the one in use, found by their processes.

An engine lists only its own containers, and podman without a service has no engine to ask. The device nodes
in a container's /dev show which GPUs it has; a container that has the machine's whole /dev shows nothing.
"""
# os scans /proc faster than pathlib does.
# ruff: noqa: PTH116, PTH208

from __future__ import annotations

import os

from imagematrix.images.engine.containers import PassedDevices, RunningContainer
from imagematrix.launcher.gpu_claims.containers import CAPABILITY, NODE, read_minor
from imagematrix.launcher.gpu_claims.processes import (
    CONTAINER,
    describe_process,
    is_in_pod,
    read_cgroup,
    read_proc_lines,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from imagematrix.hardware.host.host import Gpu

PODS = "kubepods"  # in the names of the cgroups of pods
ENTRIES = 4096  # of one folder; what is beyond was not put there by an engine


def find_other_containers(
    gpus: tuple[Gpu, ...],
    list_ids: Callable[[], Collection[str]],
    *,
    proc: str = "/proc",
) -> list[RunningContainer]:
    """Return containers with nodes of GPUs that the engine does not know.

    `list_ids` returns the ids of all containers of the engine, running or not; it is called only if needed.
    Those of pods have PODS as their `cgroup_parent`. Left out are privileged containers: they have every
    node, but seldom use it. An ordinary user sees only containers that got the nodes by mounts, as those of
    rootless podman.
    """
    if all(gpu.minor is None for gpu in gpus):
        return []
    containers = [
        (container_id, pid, paths)
        for container_id, pid, paths in _find_containers(proc)
        if not _is_privileged(pid, paths, proc)
    ]
    engine_ids = list_ids() if containers else ()
    return [
        RunningContainer(
            container_id=container_id,
            name=container_id[:12],
            image=f"{describe_process(pid, proc).name}, pid {pid}, of another engine",
            devices=PassedDevices(paths=paths),
            cgroup_parent=PODS if is_in_pod(pid, proc) else "",
        )
        for container_id, pid, paths in containers
        if container_id not in engine_ids and os.path.exists(f"{proc}/{pid}")  # noqa: PTH110 - it may have ended
    ]


def _find_containers(proc: str) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Yield the id, a process and the nodes of GPUs in it, for each container that has some."""
    seen = {_stat_identity(f"{proc}/self/root/dev")}
    yielded: set[str] = set()
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdecimal()):
        folder = f"{proc}/{pid}/root/dev"
        identity = _stat_identity(folder)  # one request for each process, and most have the machine's /dev
        if identity is not None and identity in seen:
            continue
        container_ids = CONTAINER.findall(read_cgroup(pid, proc))
        if not container_ids:
            continue
        container_id = str(container_ids[-1])  # the innermost
        if container_id in yielded:
            continue
        if identity is not None:
            seen.add(identity)
        paths = tuple(
            _list_mounted_nodes(f"{proc}/{pid}/mountinfo") if identity is None else _list_nodes(folder)
        )
        if paths:
            yielded.add(container_id)
            yield container_id, pid, paths


def _stat_identity(path: str) -> tuple[int, int] | None:
    """Return what distinguishes a folder from all others, None if this user may not see it."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _list_nodes(folder: str) -> Iterator[str]:
    """Yield the nodes of GPUs and MIG devices in a container's /dev, by the names they have on the host."""
    for path, entry in (
        *_scan_entries(folder, "/dev"),
        *_scan_entries(f"{folder}/nvidia-caps", "/dev/nvidia-caps"),
    ):
        if CAPABILITY.fullmatch(path):
            yield path
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        minor = read_minor(status)
        if minor is not None:
            yield f"/dev/nvidia{minor}"


def _scan_entries(folder: str, name: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    try:
        with os.scandir(folder) as entries:
            yield from (
                (f"{name}/{entry.name}", entry) for entry, _ in zip(entries, range(ENTRIES), strict=False)
            )
    except OSError:
        return


def _list_mounted_nodes(path: str) -> Iterator[str]:
    """Yield the nodes that are mounted into a container, from /proc/PID/mountinfo: see proc(5)."""
    for line in read_proc_lines(path):
        words = line.split(" ", 5)
        if len(words) > 5 and words[4].startswith("/dev/"):  # noqa: PLR2004 - root and mount point
            node = f"/dev{words[3]}"
            if NODE.fullmatch(node) or CAPABILITY.fullmatch(node):
                yield node


def _is_privileged(pid: int, paths: Collection[str], proc: str) -> bool:
    """Whether a process's container has all of the machine's nodes, and may gain all of its capabilities."""
    # The first process has all that this machine grants, and `--privileged` gives a container the same.
    capabilities = _read_capabilities(pid, proc)
    if capabilities is None or capabilities != _read_capabilities(1, proc):
        return False
    return set(_list_nodes(f"{proc}/self/root/dev")) <= set(paths)


def _read_capabilities(pid: int, proc: str) -> str | None:
    lines = read_proc_lines(f"{proc}/{pid}/status")
    return next((line for line in lines if line.startswith("CapBnd:")), None)
