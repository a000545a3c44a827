"""Turns at what only a few may do at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Hashable


class TimedSemaphore:
    """At most `count` turns at a time; after `longest_s` seconds, a turn lets another one begin.

    The keys for which requests wait get their turns one after the other, so that a flood of requests with
    one key delays no other. Of those with one key the newest goes first: in a flood, the oldest wait until
    they give up, and a client that comes now gets an answer. At most `most_waiting` requests wait; of more,
    the oldest of the key with the most is refused. To be used in one event loop.
    """

    def __init__(self, count: int, longest_s: float, most_waiting: int) -> None:
        self._free, self._longest_s, self._most_waiting = count, longest_s, most_waiting
        self._waiting: OrderedDict[Hashable, list[asyncio.Future[None]]] = OrderedDict()  # the newest last

    @contextlib.asynccontextmanager
    async def take_turn(self, key: Hashable) -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as the block; raise QueueFull if it is refused."""
        loop = asyncio.get_running_loop()
        if self._free:
            self._free -= 1
        else:
            begin = loop.create_future()
            self._waiting.setdefault(key, []).append(begin)
            self._refuse_oldest()
            try:
                await begin
            except asyncio.CancelledError:
                if begin.cancelled():
                    self._remove_waiting(key, begin)
                else:  # its turn began before it left
                    self._begin_next()
                raise
        with contextlib.ExitStack() as turn:  # which ends once: at the end of the block, or before
            turn.callback(self._begin_next)
            timer = loop.call_later(self._longest_s, turn.close)
            turn.callback(timer.cancel)
            yield

    def _refuse_oldest(self) -> None:
        """Refuse a request if too many wait."""
        if sum(map(len, self._waiting.values())) > self._most_waiting:
            key = max(self._waiting, key=lambda each: len(self._waiting[each]))
            oldest = self._waiting[key][0]
            self._remove_waiting(key, oldest)
            if not oldest.cancelled():
                oldest.set_exception(asyncio.QueueFull())

    def _remove_waiting(self, key: Hashable, begin: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(key, [])
        if begin in waiting:  # or its turn came as it left
            waiting.remove(begin)
            if not waiting:
                del self._waiting[key]

    def _begin_next(self) -> None:
        while self._waiting:
            key, waiting = self._waiting.popitem(last=False)
            begin = waiting.pop()
            if waiting:
                self._waiting[key] = waiting  # as the last of all keys
            if not begin.cancelled():
                begin.set_result(None)
                return
        self._free += 1
