"""Slots: the GPUs that could serve a launch, and which of them it gets."""

from __future__ import annotations

from imagematrix.allocation.usage import keys, overlap
from imagematrix.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from imagematrix.allocation.queue import Ticket
    from imagematrix.allocation.usage import Consumer
    from imagematrix.node.host import Gpu

__all__ = ["Slot", "ranked", "reserved", "unreserved"]


class Slot(Record):
    """A GPU and its `consumers`; `leased` if another process holds its lock.

    `free_mib` is the memory that another share could get, None if the GPU cannot be shared.
    """

    gpu: Gpu
    consumers: tuple[Consumer, ...]
    leased: bool
    free_mib: int | None

    @property
    def free(self) -> bool:
        """Whether nothing uses it."""
        return not (self.leased or self.consumers)

    def has_room(self, vram_mib: int | None) -> bool:
        """Whether a share of `vram_mib` fits, or with None a launch that needs the whole GPU."""
        if vram_mib is None:
            return self.free
        return self.free_mib is not None and self.free_mib >= vram_mib


def ranked(slots: Iterable[Slot], vram_mib: int | None) -> list[Slot]:
    """Return the slots that have room, best first.

    A share goes to the GPU that is shared already and has the least memory left, so that whole GPUs stay
    free. Ties keep the order of `slots`.
    """
    suitable = [slot for slot in slots if slot.has_room(vram_mib)]
    if vram_mib is None:
        return suitable
    return sorted(suitable, key=lambda slot: (slot.free, slot.free_mib or 0))


def unreserved(slots: Sequence[Slot], queue: Iterable[Ticket]) -> list[Slot]:
    """Return the slots that no ticket in `queue` reserves: each reserves its count, the emptiest first.

    No other launch gets a reserved slot, so it drains until it is as empty as the waiting launch needs.
    """
    remaining = list(slots)
    for ticket in queue:
        eligible = [[slot for slot in remaining if overlap(keys(slot.gpu), gpu)] for gpu in ticket.gpus]
        taken = sorted(filter(None, eligible), key=lambda group: max(map(_load, group)))[: ticket.count]
        remaining = [slot for slot in remaining if not any(slot in group for group in taken)]
    return remaining


def reserved(keys: Iterable[str], queue: Iterable[Ticket]) -> int:
    """Return how many of the GPUs with these keys the tickets in `queue` reserve."""
    wanted = tuple(keys)
    return sum(min(ticket.count, sum(overlap(gpu, wanted) for gpu in ticket.gpus)) for ticket in queue)


def _load(slot: Slot) -> tuple[int, int]:
    if slot.free:
        return 0, 0
    return (2, 0) if slot.free_mib is None else (1, -slot.free_mib)
