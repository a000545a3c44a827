"""Shares: the parts of a GPU's memory that launches declare, so that several of them have it together."""

from __future__ import annotations

from imagematrix.documents import natural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.allocation.usage import Use
    from imagematrix.node.host import Gpu

__all__ = ["left", "size", "total"]

MPS = "nvidia-cuda-mps"  # of nvidia-cuda-mps-server; /proc/PID/comm has 15 characters


def size(text: str) -> int | None:
    """Return the MiB that a label or a lease declares, None where it is no number of them."""
    return natural(text) or None


def total(gpu: Gpu) -> int | None:
    """Return the MiB of `gpu`, or of its only MIG device; None where they are not known.

    Of several MIG devices each has memory of its own, and there is nothing to share between them.
    """
    if not gpu.mig:
        return gpu.memory_mib
    return gpu.mig[0].memory_mib if len(gpu.mig) == 1 else None


def left(gpu: Gpu, users: Iterable[Use], *, mps: bool = False) -> int | None:
    """Return the MiB of `gpu` that its `users` leave to others; None where one has it whole, or nobody knows.

    What a lease or a process has is part of what its container has, as long as that runs. With `mps` the
    server of MPS is no user, because it works for those who share.
    """
    memory, declared = total(gpu), [use.vram_mib for use in _counting(tuple(users), mps=mps)]
    if memory is None or None in declared:
        return None
    return max(0, memory - sum(share for share in declared if share is not None))


def _counting(users: tuple[Use, ...], *, mps: bool) -> list[Use]:
    containers = [use for use in users if use.kind == "container"]
    marks = frozenset[str]().union(*(use.marks for use in containers))
    others = [use for use in users if use.kind != "container" and marks.isdisjoint(use.marks)]
    return containers + [use for use in others if not (mps and _is_mps(use))]


def _is_mps(use: Use) -> bool:
    return use.kind == "process" and use.name == MPS
