"""The reservation of each task of a service: whole GPUs, or a part of one GPU's memory.

Swarm keeps a task pending until a node has what it reserves, even if no node ever can. This module refuses
such a request.
"""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.errors import UsageError
from imagematrix.integrations.swarm.resources import GPU, OFFER, SHARES, VRAM, parse_share_mib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.integrations.swarm.nodes import SwarmNode

OFFER_GPUS = "run `imagematrix swarm node-config` on the nodes that have them"
OFFER_MEMORY = "run `imagematrix swarm node-config --vram SIZE` on the nodes that have it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A number of generic resources of one kind for each task; nothing if `kind` is None.

    `vram_mib` is the task's share of a GPU's memory, None for whole GPUs. `constraints` keep tasks away from
    nodes whose resources must not count.
    """

    kind: str | None = None
    count: int = 0
    vram_mib: int | None = None
    constraints: tuple[str, ...] = ()

    @property
    def resources(self) -> dict[str, int]:
        """The generic resources by kind."""
        return {self.kind: self.count} if self.kind else {}


def reserve_gpus(nodes: Sequence[SwarmNode], count: int) -> Reservation:
    """Return the reservation of `count` whole GPUs; raise UsageError if no node has that many.

    Nodes that also offer shares of their GPUs are left out: Swarm counts a GPU and its shares separately.
    """
    if count == 0:
        return Reservation()
    whole = [node.offers.get(GPU, 0) for node in nodes if not node.shared]
    largest = max(whole, default=0)
    if not largest:
        shared = [node.name for node in nodes if node.shared]
        raise UsageError(
            f"no node offers {'whole ' if shared else ''}GPUs"
            + (f": {', '.join(shared)} offer{'s' if len(shared) == 1 else ''} shares of them" * bool(shared)),
            remedy="request a share with --vram" if shared else OFFER_GPUS,
        )
    if count > largest:
        raise UsageError(f"requested {count} GPUs for each task, but no node offers more than {largest}")
    return Reservation(kind=GPU, count=count, constraints=(f"engine.labels.{OFFER}!={SHARES}",))


def reserve_memory(nodes: Sequence[SwarmNode], mib: int) -> Reservation:
    """Return the reservation of at least `mib` of one GPU's memory; raise UsageError if no GPU has that much.

    A service can reserve only one kind. Of the kinds that are large enough, it is the kind with room for most
    tasks in the swarm; of kinds with equal room, the one that wastes least.
    """
    fitting: dict[str, int] = {}
    sizes = {VRAM: mib}
    largest = 0
    for node in nodes:
        for kind, count in node.offers.items():
            size = count if kind == VRAM else parse_share_mib(kind)
            if size is None or not count:
                continue
            largest = max(largest, size)
            if size >= mib:
                fitting[kind] = fitting.get(kind, 0) + (count // mib if kind == VRAM else count)
                sizes.setdefault(kind, size)
    if not largest:
        raise UsageError("no node offers GPU memory", remedy=OFFER_MEMORY)
    if not fitting:
        raise UsageError(
            f"requested {mib} MiB for each task, but no node offers more than {largest} MiB of a GPU"
        )
    kind = min(fitting, key=lambda kind: (-fitting[kind], sizes[kind], kind))
    return Reservation(kind=kind, count=mib if kind == VRAM else 1, vram_mib=sizes[kind])
