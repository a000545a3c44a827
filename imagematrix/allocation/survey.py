"""A look at who uses this node's GPUs: running containers, processes, and leases."""

from __future__ import annotations

from dataclasses import replace

from imagematrix.allocation import containers, processes
from imagematrix.allocation.locks import TURN
from imagematrix.allocation.shares import size
from imagematrix.allocation.usage import Use, joined

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from imagematrix.allocation.locks import Locks
    from imagematrix.allocation.usage import Uses
    from imagematrix.node.host import Gpu
    from imagematrix.node.nvml import Nvml

__all__ = ["SHARE", "ask_nvml", "leases", "survey"]

# Begins the name of a lock that is a lease of a share: its file has the MiB and the GPUs' keys.
SHARE = "share-"


def survey(
    gpus: tuple[Gpu, ...],
    running: Callable[[], Iterable[Mapping[str, Any]]],
    ask: Callable[[], Nvml | None],
) -> Uses:
    """Return the uses of `gpus` by containers and processes.

    `running` gives the containers as `imagematrix.engine.running` does; `ask` what NVML says, or None where
    no driver is loaded, and so no process can use a GPU. Raises what `running` raises.
    """
    # Containers come last: one whose lease was let go when this look began is running by then.
    answer = ask()
    computing: Uses = {}
    if answer is not None:
        computing, told = processes.computing(answer)
        untold = {gpu.minor for gpu in gpus if gpu.minor is not None} - told
        computing = joined(computing, processes.opened(untold)) if untold else computing
    return joined(computing, containers.uses(running(), gpus))


def leases(locks: Locks) -> Uses:
    """Return the leases in `locks`, with those who hold them; one who is just choosing holds none yet.

    Shares of those who are gone are removed, as far as they are this user's.
    """
    holders = locks.holders()
    chooser = holders.get(TURN)
    whole = {
        name: (processes.describe(pid, kind="lease"),)
        for name, pid in holders.items()
        if name.startswith("nvidia") and pid != chooser
    }
    shared = [_share(locks, name, holders) for name in locks.names() if name.startswith(SHARE)]
    return joined(whole, *shared)


def _share(locks: Locks, name: str, holders: Mapping[str, int]) -> Uses:
    text = locks.text_if_held(name)
    if text is None:
        locks.remove(name)
        return {}
    declared, *keys = text.split() or [""]
    found = (
        processes.describe(holders[name], kind="lease")
        if name in holders
        else Use(kind="lease", name="unknown")
    )
    # Anybody can write one that is none: without a size it is of the whole GPU.
    use = replace(found, vram_mib=size(declared), marks=frozenset({name}))
    return dict.fromkeys(keys, (use,))


def ask_nvml() -> Nvml | None:
    """Return what NVML says; None where nothing shows a driver, because to ask might load it."""
    from imagematrix.node import nvml
    from imagematrix.node.signs import look
    from imagematrix.node.tree import Tree

    if not look(Tree("/")).driver:
        return None

    return nvml.read()
