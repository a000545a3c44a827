"""Places: the GPUs that would do for a launch, and which of them it gets."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.allocation.usage import keys, overlap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from imagematrix.allocation.queue import Ticket
    from imagematrix.allocation.usage import Use
    from imagematrix.node.host import Gpu

__all__ = ["Place", "best", "left_over", "reserved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A GPU and its `users`; `leased` where another holds its lock.

    `left_mib` is what they leave of its memory to one more who shares it, None where it can't be shared.
    """

    gpu: Gpu
    users: tuple[Use, ...]
    leased: bool
    left_mib: int | None

    @property
    def free(self) -> bool:
        """Whether nobody uses it."""
        return not (self.leased or self.users)

    def suits(self, vram_mib: int | None) -> bool:
        """Whether there is room for a share of so many MiB, or with None for who needs all of it."""
        if vram_mib is None:
            return self.free
        return self.left_mib is not None and self.left_mib >= vram_mib


def best(places: Iterable[Place], vram_mib: int | None) -> list[Place]:
    """Return the places that suit, the best first.

    Shares go where others are already and the least is left, so that whole GPUs stay free. Of equals the
    first comes first.
    """
    suitable = [place for place in places if place.suits(vram_mib)]
    if vram_mib is None:
        return suitable
    return sorted(suitable, key=lambda place: (place.free, place.left_mib or 0))


def left_over(places: Sequence[Place], before: Iterable[Ticket]) -> list[Place]:
    """Return what those who came first leave: each keeps as many places as are wanted, the emptiest.

    Nobody joins these, so that in time they are as empty as who waits for them needs.
    """
    left = list(places)
    for ticket in before:
        found = [[place for place in left if overlap(keys(place.gpu), gpu)] for gpu in ticket.gpus]
        theirs = sorted(filter(None, found), key=lambda some: max(map(_crowd, some)))[: ticket.count]
        left = [place for place in left if not any(place in some for some in theirs)]
    return left


def reserved(wanted: Iterable[str], before: Iterable[Ticket]) -> int:
    """Return how many of the GPUs with the keys `wanted` are kept for those who came first."""
    ours = tuple(wanted)
    return sum(min(ticket.count, sum(overlap(gpu, ours) for gpu in ticket.gpus)) for ticket in before)


def _crowd(place: Place) -> tuple[int, int]:
    if place.free:
        return 0, 0
    return (2, 0) if place.left_mib is None else (1, -place.left_mib)
