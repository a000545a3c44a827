"""The line of those who wait for GPUs: first come, first served.

Each has a ticket: a lock with a number, whose file says how many GPUs are wanted and which would do. Who
comes later leaves as many of these free, so that nobody waits forever while others pass, and takes the rest.
The ticket of a process that ended is not locked any more, and counts no more. Nor does that of one that does
not try: who waits looks about once a second whether there is something for it, and touches its ticket then.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from imagematrix.allocation.locks import release
from imagematrix.allocation.processes import describe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.allocation.locks import Locks

__all__ = ["Line", "Ticket"]

TICKET = "wait-"
DIGITS = 18  # what is longer was not made here
STALE_S = 60.0  # to wait for one's turn takes seconds where many wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What one launch waits for: `count` of these GPUs, each of which goes by one or several keys.

    `by` says which process it is, where that is known.
    """

    count: int
    gpus: tuple[tuple[str, ...], ...]
    by: str = ""

    def __str__(self) -> str:
        return " ".join([str(self.count), *map(",".join, self.gpus)])


class Line:
    """The line in one folder of locks, and this launch's own place in it, if it has joined.

    All but `leave` is done in turn.
    """

    def __init__(self, locks: Locks) -> None:
        self._locks = locks
        self._number: int | None = None
        self._held: tuple[int, ...] = ()

    @property
    def joined(self) -> bool:
        """Whether this launch has a place in the line."""
        return self._number is not None

    def join(self, ticket: Ticket) -> None:
        """Stand at the end of the line."""
        self._number = max((_number(name) for name in self._tickets()), default=0) + 1
        self._held = self._locks.hold(f"{TICKET}{self._number:09d}", str(ticket))

    def earlier(self) -> list[Ticket]:
        """Return the tickets of those who came earlier and still try, in their order."""
        for held in self._held:
            os.utime(held)
        found = []
        holders = self._locks.holders()
        for name in self._tickets():
            if self._number is not None and _number(name) >= self._number:
                break
            text = self._locks.text_if_held(name)
            if text is None:
                self._locks.remove(name)
            elif self._locks.age(name) < STALE_S:
                found += _read(text, str(describe(holders[name])) if name in holders else "")
        return found

    def leave(self) -> None:
        """Give up this launch's place."""
        if self._number is not None:
            self._locks.remove(f"{TICKET}{self._number:09d}")
            release(self._held)
            self._number, self._held = None, ()

    def _tickets(self) -> list[str]:
        return sorted((name for name in self._locks.names() if _is_ticket(name)), key=_number)


def _is_ticket(name: str) -> bool:
    number = name.removeprefix(TICKET)
    return number != name and number.isascii() and number.isdecimal() and len(number) <= DIGITS


def _read(text: str, by: str) -> list[Ticket]:
    count, *gpus = text.split() or [""]
    # Anybody can write one that is none, or that nothing could ever serve.
    if not (count.isascii() and count.isdecimal() and len(count) <= DIGITS and 0 < int(count) <= len(gpus)):
        return []
    return [Ticket(count=int(count), gpus=tuple(tuple(gpu.split(",")) for gpu in gpus), by=by)]


def _number(name: str) -> int:
    return int(name[len(TICKET) :])
