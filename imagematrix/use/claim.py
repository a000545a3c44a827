"""Claims: taking GPUs that nobody uses, and keeping them from all others."""

from __future__ import annotations

import time
from contextlib import ExitStack

from imagematrix.errors import GpusBusyError
from imagematrix.use.line import Line, Ticket
from imagematrix.use.locks import Locks, folder, inherit, release
from imagematrix.use.survey import leases
from imagematrix.use.uses import joined, keys, overlap, users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from imagematrix.probe.host import Gpu
    from imagematrix.use.uses import Use, Uses

__all__ = ["Claim", "claim"]

POLL_S = 1.0


class Claim:
    """GPUs that are this process's alone until it ends or releases them."""

    def __init__(self, gpus: tuple[Gpu, ...], held: tuple[int, ...]) -> None:
        self.gpus = gpus
        self._held = held

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        release(self._held)
        self._held = ()

    def pass_on(self) -> None:
        """Let the claim live on in the program that this process becomes through exec."""
        inherit(self._held)


def claim(
    gpus: tuple[Gpu, ...],
    count: int,
    look: Callable[[], Uses],
    *,
    wait_s: float = 0.0,
    tell: Callable[[str], None] = lambda _: None,
    path: str | None = None,
) -> Claim:
    """Return a claim on the first `count` of `gpus` that nobody uses.

    `look` says who uses which (`imagematrix.use.survey`). Where too few are free, this waits for up to
    `wait_s` seconds, behind those who came earlier, and tells `tell` why. `path` is the folder of the locks,
    by default the one of this node. Raises GpusBusyError, which names the users, and what `look` raises.
    """
    ticket = Ticket(count=count, keys=frozenset(key for gpu in gpus for key in keys(gpu)))
    deadline = time.monotonic() + wait_s
    told = None
    with ExitStack() as stack:
        locks = stack.enter_context(Locks(path or folder()))
        line = Line(locks)
        stack.callback(line.leave)
        while True:
            with locks.turn():
                before = [earlier for earlier in line.earlier() if overlap(ticket.keys, earlier.keys)]
                found = _try(locks, gpus, count, look, before)
                if isinstance(found, Claim):
                    return found
                if wait_s and not line.joined:
                    line.join(ticket)
            left = deadline - time.monotonic()
            if left <= 0:
                raise GpusBusyError(found, remedy="see `imagematrix gpus`, or wait for them with --wait 10m")
            if told != len(before):
                told = len(before)
                tell(f"waiting: {found}")
            time.sleep(min(POLL_S, left))


def _try(
    locks: Locks, gpus: tuple[Gpu, ...], count: int, look: Callable[[], Uses], before: list[Ticket]
) -> Claim | str:
    """Return the claim, or why there is none now; it is this launch's turn."""
    if len(gpus) - sum(ticket.count for ticket in before) < count:
        return f"{_counted(count, 'GPU')} asked for, and {_counted(len(before), 'other')} came first"
    held: dict[int, tuple[int, ...]] = {}
    try:
        for gpu in gpus:
            held[gpu.index] = locks.take(*keys(gpu)) or ()
        # Only now: who has let go of a lease has a container by now, or wants no GPU any more.
        uses = joined(leases(locks), look())
        free = [gpu for gpu in gpus if held[gpu.index] and not users(uses, keys(gpu))]
        ours = _left(free, before)
        if len(ours) < count:
            busy = [_used(gpu, users(uses, keys(gpu))) for gpu in gpus if gpu not in free]
            first = [f"{_counted(len(before), 'other')} came first"] if before else []
            return f"{_counted(count, 'GPU')} asked for, {len(free)} free: {'; '.join(busy + first)}"
        chosen = tuple(ours[:count])
        return Claim(chosen, tuple(lock for gpu in chosen for lock in held.pop(gpu.index)))
    finally:
        for taken in held.values():
            release(taken)


def _left(free: list[Gpu], before: list[Ticket]) -> list[Gpu]:
    """Return what those who came first leave over: each gets the first GPUs that would do for them."""
    left = free
    for ticket in before:
        theirs = [gpu for gpu in left if overlap(keys(gpu), ticket.keys)][: ticket.count]
        left = [gpu for gpu in left if gpu not in theirs]
    return left


def _used(gpu: Gpu, by: tuple[Use, ...]) -> str:
    return f"{gpu.label} is used by {', '.join(map(str, by)) or 'a lease that this process cannot look at'}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
