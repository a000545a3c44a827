"""The number of CPUs that this process may use, by its affinity and the quotas of its control groups.

A program that sizes its pools of threads by this number may compile it in. Quotas are those of cgroup v1
(cpu.cfs_quota_us) and v2 (cpu.max), of each group from the process's own to the root.
"""

from __future__ import annotations

import os
from itertools import product

from imagematrix.common.json_documents import parse_natural
from imagematrix.common.record import replace
from imagematrix.hardware.host.tree import Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.hardware.host.host import Host

GROUPS = "/proc/self/cgroup"
MOUNT = "/sys/fs/cgroup"
CONTROLLER = "cpu"  # of cgroup v1


def add_usable_cpus(host: Host) -> Host:
    """Return a host, which is this machine, with the number of CPUs that this process may use.

    It is None where the system does not tell; with a warning, where a quota cannot be read.
    """
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return host
    tree = Tree("/")
    usable: int | None = count_usable_cpus(tree, len(os.sched_getaffinity(0)))
    warnings = host.warnings
    if tree.warnings:
        usable, warnings = None, (*warnings, *tree.warnings)
    return replace(host, cpu=replace(host.cpu, usable=usable), warnings=warnings)


def count_usable_cpus(tree: Tree, allowed: int) -> int:
    """Return the number of CPUs that a process may use which is `allowed` to run on so many.

    A quota that is no whole number of CPUs counts as the next one.
    """
    quotas = [-(-quota // period) for quota, period in _list_quotas(tree) if quota > 0 and period > 0]
    return min([allowed, *quotas])


def _list_quotas(tree: Tree) -> Iterator[tuple[int, int]]:
    """Yield the quotas and periods, in microseconds, of the groups of this process."""
    for folder, is_unified in _list_folders(tree):
        names = ("cpu.max",) if is_unified else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(tree.read_text(f"{folder}/{name}") or "" for name in names).split()
        # Without a quota, the first word is "max" or -1.
        quota, period = (parse_natural(word) for word in (*words, "", "")[:2])
        if quota and period:
            yield quota, period


def _list_folders(tree: Tree) -> Iterator[tuple[str, bool]]:
    """Yield the folders of the groups that limit CPUs, and whether each is of cgroup v2.

    In a container the path may be that of the node, where only the mount's root exists: so each folder
    between the two is tried.
    """
    for line in (tree.read_text(GROUPS) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and CONTROLLER not in controllers.split(","):
            continue
        # Of cgroup v1, a hierarchy is mounted under the names of its controllers, most often with a link.
        mounts = [f"{MOUNT}/{name}" for name in (controllers, CONTROLLER)] if controllers else [MOUNT]
        # Above the root of a namespace of groups, a path begins with "..".
        names = [name for name in path.split("/") if name and name != ".."]
        for mount, depth in product(dict.fromkeys(mounts), range(len(names), -1, -1)):
            yield "/".join([mount, *names[:depth]]), not controllers
