"""The connections of a service: their number, what they make it keep, and which of them give way.

A connection is *asking* until its request is whole, that is through the handshake of TLS, the head and the
body; then it is being answered; then it is idle. When there is no room, the oldest connection gives way that
has sent nothing for a while, or else the oldest without a whole request. One that has is answered, if its
client is not too slow to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from imagematrix.pace import Pace, Traffic

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

__all__ = ["Connections", "Limits", "body", "keep"]

LOOK_S = 0.5  # between looks at the pace of clients
SHORT_S = 1.0  # for which a client may be slow while others wait for its place
MOMENT_S = 0.05  # between looks for closed connections
MUTE_S = 0.5  # without a byte, after which a client is the first to give way
HANDSHAKES = 4  # to begin in a turn of the loop
SMALL = 1 << 16  # bytes of a body that take no room: less than the buffers of a connection

_BODY: ContextVar[bytes] = ContextVar("body")  # each request has a context of its own
_KEEP: ContextVar[Callable[[int], None]] = ContextVar("keep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the clients of a service may take of it.

    There are at most `clients` connections, `peer` of one IP address. Bodies have at most `body` bytes each,
    and those of more than SMALL have `bodies` bytes together. Answers keep `answers` bytes. A client that
    owes bytes of its request, or the reading of its answer, and moves less than `least` bytes/s for `slow_s`
    seconds is dropped.
    """

    clients: int = 850  # four for each of 200 pulls, and others
    peer: int = 750
    body: int = 0
    bodies: int = 32 << 20
    answers: int = 168 << 20  # of 600 layers, so that there are always places for other requests
    least: int = 64 << 10
    slow_s: float = 10.0


def keep(size: int) -> None:
    """Take memory for the answer to the request at hand, in bytes, until it is sent.

    Raises HTTPTooManyRequests if clients that read fast enough have all of it.
    """
    _KEEP.get()(size)


def body() -> bytes:
    """Return the body of the request at hand."""
    return _BODY.get()


class _Connection:
    """A connection, and what it has of the service.

    `close` ends it at once. `room` are the bytes that its body takes of the room for bodies, and it is `held`
    while it waits for that room. Its answer keeps `kept` bytes.
    """

    def __init__(self, client: socket.socket, peer: str) -> None:
        self.socket, self.peer, self.descriptor = client, peer, client.fileno()
        self.asking, self.idle, self.held, self.room, self.kept = True, False, False, 0, 0
        self.close: Callable[[], object] = client.close
        self.opened = _now()
        self.pace = Pace(None, self.opened, 0)

    @property
    def gone(self) -> bool:
        return self.socket.fileno() < 0

    @property
    def has_sent(self) -> bool:
        """Whether its client has sent something, which perhaps was not read."""
        try:
            return Traffic.of(self.socket).given > 0
        except OSError:  # it is closed
            return False

    @property
    def sending(self) -> bool:
        """Whether an answer is still queued for the client."""
        try:
            return Traffic.of(self.socket).queued > 0
        except OSError:  # it is closed
            return False

    def look(self, least: float) -> None:
        """See how far the client has come; an idle client that sends something begins a request."""
        traffic = Traffic.of(self.socket)
        self.asking = self.asking or (self.idle and traffic.given > self.pace.moved)
        asking = self.asking and not self.held
        self.pace = self.pace.after(_now(), traffic, asking=asking, least=least)

    def slow_s(self) -> float:
        return self.pace.slow_s(_now()) if self.pace.owed else 0.0


class Connections:
    """The connections of a service, within its limits. To be used in one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._all: dict[int, _Connection] = {}  # by file descriptor
        self._waiting: dict[_Connection, None] = {}  # those without a whole request, the oldest first
        self._silent: dict[_Connection, None] = {}  # those of them from which nothing was read
        self._kept = 0  # bytes of answers
        self._forgot_closed = -math.inf  # when closed connections were last looked for
        self._peers: Counter[str] = Counter()
        self._taken = 0  # bytes of the room for bodies
        self._freed = asyncio.Event()
        self._turns: list[asyncio.Event] = []  # of handshakes, the newest last
        self._turned = asyncio.Event()
        self._opening: set[asyncio.Task[None]] = set()

    def crowded(self, peer: str) -> bool:
        """Whether an address has all its connections, and none of them gives way."""
        if self._peers[peer] >= self._limits.peer:
            self._forget_closed()
        return self._peers[peer] >= self._limits.peer and not self._one_gives_way(
            lambda each: each.peer == peer
        )

    def make_place(self) -> bool:
        """Whether there is a place for one more, after another gave way if need be."""
        if len(self._all) >= self._limits.clients:
            self._forget_closed()
        return len(self._all) < self._limits.clients or self._one_gives_way(lambda _: True)

    def open(self, client: socket.socket, peer: str, server: web.Server, tls: ssl.SSLContext | None) -> None:
        """Give a connection to the server, after the handshake of TLS."""
        earlier = self._all.get(client.fileno())
        if earlier:  # it is closed, because its descriptor is free
            self._forget(earlier)
        connection = _Connection(client, peer)
        self._all[connection.descriptor] = connection
        self._waiting[connection] = self._silent[connection] = None
        self._peers[peer] += 1
        task = asyncio.create_task(self._shake_hands(connection, server, tls))
        connection.close = task.cancel
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        task.add_done_callback(partial(_close_if_cancelled, client))

    async def _shake_hands(
        self, connection: _Connection, server: web.Server, tls: ssl.SSLContext | None
    ) -> None:
        loop = asyncio.get_running_loop()
        await _readable(connection.socket)  # a silent client costs nothing more
        self._silent.pop(connection, None)
        if tls:
            turn = asyncio.Event()
            self._turns.append(turn)
            self._turned.set()
            await turn.wait()
        with contextlib.suppress(OSError):  # the client has gone, or speaks no TLS
            transport, _ = await loop.connect_accepted_socket(server, connection.socket, ssl=tls)
            connection.close = transport.abort

    async def watch(self) -> None:
        """Begin handshakes, and drop clients that are too slow, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._begin_handshakes())
            group.create_task(self._drop_slow())

    async def _begin_handshakes(self) -> None:
        """Begin a few handshakes in each turn of the loop, as each takes a millisecond; the newest first.

        In a flood of them the oldest wait until they give way, and a client that comes now gets its answer.
        """
        while True:
            await self._turned.wait()
            for turn in reversed(self._turns[-HANDSHAKES:]):
                turn.set()
            del self._turns[-HANDSHAKES:]
            if not self._turns:
                self._turned.clear()
            await asyncio.sleep(0)

    async def _drop_slow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for connection in [*self._all.values()]:
                try:
                    connection.look(self._limits.least)
                except OSError:  # it is closed
                    self._forget(connection)
                else:
                    if connection.slow_s() >= self._limits.slow_s:
                        self._drop(connection)

    async def end(self) -> None:
        """End all: clients may be in their handshake, not answer the closing of TLS, or read nothing."""
        opening = [*self._opening]
        for connection in [*self._all.values()]:
            self._drop(connection)
        await asyncio.gather(*opening, return_exceptions=True)
        await asyncio.sleep(0)  # the loop closes the sockets

    @web.middleware
    async def answering(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Read the whole request, and note that it has to be answered until the last byte is sent."""
        task, connection = asyncio.current_task(), self._of(request)
        assert task is not None  # noqa: S101 - for the type checker
        # aiohttp sends the answer in the task of the request.
        task.add_done_callback(lambda _: self._answered(connection))
        connection.asking, connection.idle = True, False
        _KEEP.set(partial(self._keep, connection))
        _BODY.set(await self._body(connection, request))
        connection.asking = False
        connection.pace = Pace(None, _now(), 0)  # it owes nothing
        self._waiting.pop(connection, None)
        try:
            return await handler(request)
        finally:
            self._free_body(connection)

    def _keep(self, connection: _Connection, size: int) -> None:
        while self._kept + size > self._limits.answers:
            keeping = [each for each in self._all.values() if each.kept]
            if not self._slowest_gives_way(keeping):
                raise web.HTTPTooManyRequests(text=f"{len(keeping)} answers are being read: try again later")
        connection.kept += size
        self._kept += size

    def _of(self, request: web.Request) -> _Connection:
        transport = request.transport
        client = transport and transport.get_extra_info("socket")
        connection = self._all.get(client.fileno()) if client else None
        if connection is None:
            raise ConnectionResetError("the client has gone")
        return connection

    async def _body(self, connection: _Connection, request: web.Request) -> bytes:
        if not request.body_exists:
            return b""
        size = self._limits.body if request.content_length is None else request.content_length
        if size > self._limits.body:
            raise web.HTTPRequestEntityTooLarge(self._limits.body, size)
        if size > SMALL:
            await self._take(connection, size)
        read = bytearray()
        async for piece in request.content.iter_any():
            read += piece
            if len(read) > self._limits.body:
                raise web.HTTPRequestEntityTooLarge(self._limits.body, len(read))
        return bytes(read)

    async def _take(self, connection: _Connection, size: int) -> None:
        """Take room for a body; the oldest whose body is not whole gives way."""
        connection.held = True
        while self._taken + size > self._limits.bodies:
            oldest = next((each for each in self._waiting if each.room), None)
            if oldest:
                self._drop(oldest)
            else:  # all are whole, and will be answered
                self._freed.clear()
                await self._freed.wait()
        connection.held, connection.room = False, size
        self._taken += size

    def _free_body(self, connection: _Connection) -> None:
        self._taken -= connection.room
        connection.room = 0
        self._freed.set()

    def _free_answer(self, connection: _Connection) -> None:
        self._kept -= connection.kept
        connection.kept = 0

    def _answered(self, connection: _Connection) -> None:
        self._free_body(connection)
        self._free_answer(connection)
        if self._all.get(connection.descriptor) is not connection:
            return
        self._waiting.pop(connection, None)
        self._waiting[connection] = None  # as the newest
        connection.asking, connection.idle, connection.held = False, True, False
        with contextlib.suppress(OSError):  # it is closed
            connection.pace = Pace.start(None, _now(), Traffic.of(connection.socket))

    def _one_gives_way(self, among: Callable[[_Connection], bool]) -> bool:
        """Drop the oldest connection without a whole request, or else one that reads its answer slowly.

        Those that have sent nothing for a while go first: what others sent may wait for this process.
        """
        for connection in filter(among, itertools.chain(self._mute(), self._waiting)):
            if not connection.idle or not connection.sending:
                self._drop(connection)
                return True
        return self._slowest_gives_way(filter(among, self._all.values()))

    def _mute(self) -> Iterator[_Connection]:
        """Yield the connections that have sent nothing for MUTE_S, the oldest first."""
        for connection in [*self._silent]:
            if _now() - connection.opened < MUTE_S:
                return
            if connection.has_sent:
                del self._silent[connection]
            else:
                yield connection

    def _slowest_gives_way(self, among: Iterable[_Connection]) -> bool:
        slowest = max(among, key=_Connection.slow_s, default=None)
        if slowest is None or slowest.slow_s() < SHORT_S:
            return False
        self._drop(slowest)
        return True

    def _drop(self, connection: _Connection) -> None:
        self._forget(connection)
        connection.close()

    def _forget_closed(self) -> None:
        """Forget the connections that their clients closed, if that was not done a moment ago."""
        if _now() - self._forgot_closed < MOMENT_S:
            return
        self._forgot_closed = _now()
        for connection in [each for each in self._all.values() if each.gone]:
            self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        if self._all.get(connection.descriptor) is connection:
            del self._all[connection.descriptor]
            self._peers[connection.peer] -= 1
            if not self._peers[connection.peer]:
                del self._peers[connection.peer]
        self._waiting.pop(connection, None)
        self._silent.pop(connection, None)
        self._free_body(connection)
        self._free_answer(connection)


async def _readable(client: socket.socket) -> None:
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(client, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(client)


def _close_if_cancelled(client: socket.socket, opened: asyncio.Task[None]) -> None:
    if opened.cancelled():  # perhaps before it gave the connection to the loop
        client.close()


def _now() -> float:
    return asyncio.get_running_loop().time()
