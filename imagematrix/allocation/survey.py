"""Surveys of the usage of this node's GPUs by running containers, processes and leases."""

from __future__ import annotations

from imagematrix.allocation import containers, processes
from imagematrix.allocation.grants import grants
from imagematrix.allocation.locks import TURN
from imagematrix.allocation.shares import parse_mib
from imagematrix.allocation.usage import Consumer, combined, consumers
from imagematrix.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from imagematrix.allocation.locks import Locks
    from imagematrix.allocation.usage import Usage
    from imagematrix.node.host import Gpu
    from imagematrix.node.nvml import Nvml

__all__ = ["SHARE", "leases", "query_nvml", "survey", "survey_quickly"]

# Prefix of the locks that are leases of a share: the file contains the MiB and the keys of the GPUs.
SHARE = "share-"


def survey(
    gpus: tuple[Gpu, ...],
    running: Callable[[], Iterable[Mapping[str, Any]]],
    query: Callable[[], Nvml | None],
) -> Usage:
    """Return the usage of `gpus` by containers and processes.

    `running` returns the containers as `imagematrix.engine.running` does. `query` returns the state from
    NVML, or None if no driver is loaded, so that no process can use a GPU. Raises what `running` raises.
    """
    # Containers come last: if a launch released its lease before the survey, its container runs by then.
    nvml = query()
    computing: Usage = {}
    if nvml is not None:
        computing, covered = processes.computing(nvml)
        uncovered = {gpu.minor for gpu in gpus if gpu.minor is not None} - covered
        computing = combined(computing, processes.with_open_nodes(uncovered)) if uncovered else computing
    return combined(computing, containers.usage(running(), gpus))


def survey_quickly(
    gpus: tuple[Gpu, ...],
    given: Callable[[], Usage],
    survey: Callable[[], Usage],
) -> Usage:
    """Return the usage of `gpus`, from `survey` only if a process has a GPU open that it was not given.

    `given` returns the usage by containers. A query of NVML takes longer than starting a container, and adds
    nothing if only containers use GPUs.
    """
    opened = processes.with_open_nodes({gpu.minor for gpu in gpus if gpu.minor is not None})
    usage = given()
    for key, using in opened.items():
        marks = frozenset[str]().union(*(consumer.marks for consumer in consumers(usage, [key])))
        if any(marks.isdisjoint(process.marks) for process in using):
            return survey()
    return usage


def leases(locks: Locks, *, whole: bool = True) -> Usage:
    """Return the leases in `locks` with their holders, and the grants.

    Without `whole`, leases of whole GPUs are left out, which saves 10 ms if there are no shares. A launch
    that is still choosing has no lease yet. Removes the files of shares whose process has ended, as far as
    this user may.
    """
    shares = [name for name in locks.names() if name.startswith(SHARE)]
    holders = locks.holders() if whole or shares else {}
    chooser = holders.get(TURN)
    leased = {
        name: (processes.describe(pid, kind="lease"),)
        for name, pid in holders.items()
        if name.startswith("nvidia") and pid != chooser
    }
    return combined(leased, *(_share(locks, name, holders) for name in shares), grants(locks))


def _share(locks: Locks, name: str, holders: Mapping[str, int]) -> Usage:
    text = locks.text_if_held(name)
    if text is None:
        locks.remove(name)
        return {}
    declared, *keys = text.split() or [""]
    holder = (
        processes.describe(holders[name], kind="lease")
        if name in holders
        else Consumer(kind="lease", name="unknown")
    )
    # Any user can write a malformed file: without a valid size the lease is for the whole GPU.
    lease = replace(holder, vram_mib=parse_mib(declared), marks=frozenset({name}))
    return dict.fromkeys(keys, (lease,))


def query_nvml() -> Nvml | None:
    """Return the state from NVML; None if no driver is loaded, because a query might load it."""
    from imagematrix.node import nvml, signs
    from imagematrix.node.tree import Tree

    if not signs.find(Tree("/")).driver:
        return None

    return nvml.read()
