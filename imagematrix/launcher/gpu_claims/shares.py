"""Shares: declared parts of a GPU's memory, with which several launches can use one GPU."""

from __future__ import annotations

from imagematrix.common.json_documents import parse_natural
from imagematrix.hardware.gpu_request.choice import get_memory_mib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.hardware.host.host import Gpu
    from imagematrix.launcher.gpu_claims.usage import Consumer

MPS = "nvidia-cuda-mps"  # nvidia-cuda-mps-server and -control, cut to the 15 characters of /proc/PID/comm


def parse_mib(text: str) -> int | None:
    """Return the MiB that a label or a lease declares, None if the text is not a positive integer."""
    return parse_natural(text) or None


def compute_remaining(gpu: Gpu, consumers: Iterable[Consumer], *, mps: bool = False) -> int | None:
    """Return the MiB of `gpu` that its `consumers` leave; None if unknown or if one uses the whole GPU."""
    memory = get_memory_mib(gpu)
    declared = [consumer.vram_mib for consumer in select_counted(tuple(consumers), mps=mps)]
    if memory is None or None in declared:
        return None
    return max(0, memory - sum(share for share in declared if share is not None))


def select_counted(consumers: tuple[Consumer, ...], *, mps: bool) -> list[Consumer]:
    """Return the consumers that count as users of a GPU.

    A lease or a process counts as part of its container while the container runs, and a process as part of
    its lease. With `mps` the MPS server does not count, because it works on behalf of the shares.
    """
    counted: list[Consumer] = []
    owner_ids = frozenset[str]()
    for kind in ("container", "lease", "process"):
        own = [
            consumer
            for consumer in consumers
            if consumer.kind == kind
            and owner_ids.isdisjoint(consumer.owner_ids)
            and not (mps and kind == "process" and consumer.name == MPS)
        ]
        counted += own
        owner_ids = owner_ids.union(*(consumer.owner_ids for consumer in own))
    return counted
