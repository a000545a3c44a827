"""The queue of launches that wait for GPUs: first come, first served.

A waiting launch holds a ticket: a numbered lock whose file states how many GPUs it needs and which are
eligible. Later launches leave that many of these GPUs free and take the rest, so that no launch starves. A
ticket counts only while its process holds the lock, and while it is fresh: a waiting launch retries about
once a second and touches its ticket each time.
"""

from __future__ import annotations

import os

from imagematrix.common.record import Record
from imagematrix.launcher.gpu_claims.locks import release_locks
from imagematrix.launcher.gpu_claims.processes import describe_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.launcher.gpu_claims.locks import Locks

TICKET = "wait-"
DIGITS = 18  # tickets have no longer numbers
STALE_S = 60.0  # with many launches in the queue, a launch waits seconds for its turn


class Ticket(Record):
    """The GPUs that one launch waits for: `count` of `gpus`, each as its keys.

    `holder` describes the process; it is empty if unknown.
    """

    count: int
    gpus: tuple[tuple[str, ...], ...]
    holder: str = ""

    def __str__(self) -> str:
        return " ".join([str(self.count), *map(",".join, self.gpus)])


class Queue:
    """The queue in one folder of locks, and this launch's position in it once it has joined.

    Call everything except `leave` while holding the mutex of the locks.
    """

    def __init__(self, locks: Locks) -> None:
        self._locks = locks
        self._number: int | None = None
        self._descriptors: tuple[int, ...] = ()

    @property
    def is_joined(self) -> bool:
        """Whether this launch is in the queue."""
        return self._number is not None

    def join(self, ticket: Ticket) -> None:
        """Append this launch to the queue."""
        # Only live tickets count: any user can leave a file with the highest number, and others cannot remove
        # it.
        names = self._list_ticket_names()
        live = [_parse_number(name) for name in names if self._locks.read_held_text(name) is not None]
        number = max(live, default=0) + 1
        while _format_name(number) in names:
            number += 1
        self._number = number
        self._descriptors = self._locks.hold(_format_name(number), str(ticket))

    def list_ahead(self) -> list[Ticket]:
        """Return the live tickets ahead of this launch, in order, and touch its own."""
        for descriptor in self._descriptors:
            os.utime(descriptor)
        tickets: list[Ticket] = []
        names = self._list_ticket_names()
        holders = self._locks.find_holders() if names else {}
        for name in names:
            if self._number is not None and _parse_number(name) >= self._number:
                break
            text = self._locks.read_held_text(name)
            if text is None:
                # Its process has ended without leaving the queue.
                self._locks.remove(name)
            # A process that was stopped keeps its lock, and must not stop the queue.
            elif self._locks.measure_age(name) < STALE_S:
                holder = str(describe_process(holders[name])) if name in holders else ""
                ticket = _parse_ticket(text, holder)
                tickets += [ticket] if ticket else []
        return tickets

    def leave(self) -> None:
        """Remove this launch from the queue."""
        if self._number is not None:
            self._locks.remove(_format_name(self._number))
            release_locks(self._descriptors)
            self._number, self._descriptors = None, ()

    def _list_ticket_names(self) -> list[str]:
        names = []
        for name in self._locks.list_names():
            number = name.removeprefix(TICKET)
            if number != name and number.isascii() and number.isdecimal() and len(number) <= DIGITS:
                names.append(name)
        return sorted(names, key=_parse_number)


def _parse_ticket(text: str, holder: str) -> Ticket | None:
    count, *gpus = text.split() or [""]
    # Any user can write a malformed ticket, or one that nothing could ever satisfy.
    if not (count.isascii() and count.isdecimal() and len(count) <= DIGITS and 0 < int(count) <= len(gpus)):
        return None
    return Ticket(count=int(count), gpus=tuple(tuple(gpu.split(",")) for gpu in gpus), holder=holder)


def _format_name(number: int) -> str:
    return f"{TICKET}{number:09d}"


def _parse_number(name: str) -> int:
    return int(name[len(TICKET) :])
