"""The connections of a service: their number, what they make it keep, and which of them give way.

A client that connects waits *outside*, not read, until it begins to ask and there is a place for it. Its
connection is *asking* until its request is whole: through the handshake of TLS, the head and the body. Then
it is being answered, and then it is idle. When there is no place, the oldest connection without a whole
request gives way, unless it is young: in a flood of new clients, each would give way to the next before it
could ask anything. One whose request is whole is answered, if its client is not too slow to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import socket
from collections import Counter, OrderedDict, deque
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from imagematrix.integrations.http_service.pace import Pace, Traffic

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Iterable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

LOOK_S = 0.5  # between looks at the pace of clients
SHORT_S = 1.0  # for which a client may be slow while others wait for its place
MOMENT_S = 0.05  # between looks for closed connections
YOUNG_S, YOUNG_TURNS = 0.25, 12  # of the loop: enough for a handshake and a request in a flood of them
KNOWN = 1_024  # addresses that got answers, to remember
OUTSIDE = 2_048  # clients that wait for a place, but no more than half of the files that may be open
ADMIT_S = 0.02  # between looks for a place for those outside
BATCH = 8, 64  # clients to admit in a turn of the loop, at least and at most
ADMITTED = 1_000  # in a second, if turns are long: a handshake takes a millisecond
RECORD = 5  # bytes of the head of a record of TLS: its type, a version, and its length (RFC 8446, 5.1)
HANDSHAKE = b"\x16"  # the type of a client's first record
CLOSED, CLOSE_WAIT = 7, 8  # of include/net/tcp_states.h
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


def reserve_memory(size: int) -> None:
    """Take memory for the answer to the request at hand, in bytes, until it is sent.

    Raises HTTPTooManyRequests if clients that read fast enough have all of it.
    """
    _KEEP.get()(size)


def read_body() -> bytes:
    """Return the body of the request at hand."""
    return _BODY.get()


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A client outside: its IP address, and since when it is here."""

    peer: str
    since: float


class _Connection:
    """A connection, and what it has of the service.

    It was admitted in the turn `turn` of the loop. `close` ends it at once. `room` are the bytes that its
    body takes of the room for bodies, and it is `held` while it waits for that room. Its answer keeps `kept`
    bytes.
    """

    def __init__(self, client: socket.socket, peer: str, turn: int) -> None:
        self.turn = turn
        self.socket, self.peer, self.descriptor = client, peer, client.fileno()
        self.asking, self.idle, self.held, self.room, self.kept = True, False, False, 0, 0
        self.close: Callable[[], object] = client.close
        self.opened = _get_time()
        self.pace = Pace(None, self.opened, 0)

    @property
    def gone(self) -> bool:
        return self.socket.fileno() < 0

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
        self.pace = self.pace.after(_get_time(), traffic, asking=asking, least=least)

    def slow_s(self) -> float:
        return self.pace.slow_s(_get_time()) if self.pace.owed else 0.0


class Connections:
    """The connections of a service, within its limits. To be used in one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._turn = 0  # of those in which clients may be admitted
        self._all: dict[int, _Connection] = {}  # by file descriptor
        self._waiting: dict[_Connection, None] = {}  # those without a whole request, the oldest first
        self._kept = 0  # bytes of answers
        self._forgot_closed = -math.inf  # when closed connections were last looked for
        self._peers: Counter[str] = Counter()
        self._taken = 0  # bytes of the room for bodies
        self._freed = asyncio.Event()
        self._opening: set[asyncio.Task[None]] = set()
        self._outside: dict[socket.socket, _Arrival] = {}  # the newest last
        self._most_outside = min(OUTSIDE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._strangers: dict[socket.socket, str] = {}  # those of them that ask, with their addresses
        self._known: dict[socket.socket, str] = {}  # the same, of addresses that got answers before
        self._answered_peers: OrderedDict[str, None] = OrderedDict()  # the newest last
        self._admitted = 0  # in all
        self._somebody_asks = asyncio.Event()
        self._crowded: set[str] = set()  # addresses of which some wait because they have all their places
        self._full = False  # so that some wait of any address

    def arrive(self, client: socket.socket, peer: str, *, tls: bool) -> None:
        """Take a new client from an IP address; it waits outside until it asks and has a place."""
        if len(self._outside) >= self._most_outside:  # the oldest goes that asks nothing
            silent = (one for one in self._outside if not self._asks(one))
            self._turn_away(next(silent, next(iter(self._outside))))
        self._outside[client] = _Arrival(peer, _get_time())
        if tls:
            self._when_sent(client, RECORD, self._await_record)
        else:
            self._when_sent(client, 1, self._note_asking)

    def _when_sent(self, client: socket.socket, size: int, then: Callable[[socket.socket], None]) -> None:
        """Call `then` when a client has sent `size` bytes, or sends no more."""
        with contextlib.suppress(OSError):  # reading it tells
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
        self._loop.add_reader(client, then, client)

    def _await_record(self, client: socket.socket) -> None:
        """Wait until the first record of TLS is whole; one who sends a part of it costs nothing more."""
        head = b""
        with contextlib.suppress(OSError):  # as above
            head = client.recv(RECORD, socket.MSG_PEEK)
        if head[:1] == HANDSHAKE:
            self._when_sent(client, RECORD + int.from_bytes(head[3:]), self._note_asking)
        else:  # it speaks no TLS, or has gone
            self._note_asking(client)

    def _note_asking(self, client: socket.socket) -> None:
        """Note that a client asks."""
        self._loop.remove_reader(client)
        with contextlib.suppress(OSError):  # as above
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        arrival = self._outside[client]
        (self._known if arrival.peer in self._answered_peers else self._strangers)[client] = arrival.peer
        self._somebody_asks.set()

    def _turn_away(self, client: socket.socket) -> None:
        self._forget_asking(client)
        del self._outside[client]
        self._loop.remove_reader(client)
        client.close()

    def _asks(self, client: socket.socket) -> bool:
        return client in self._known or client in self._strangers

    def _forget_asking(self, client: socket.socket) -> None:
        self._known.pop(client, None)
        self._strangers.pop(client, None)

    async def _admit(self, server: web.Server, tls: ssl.SSLContext | None) -> None:
        """Give places to the clients that ask, a few in each turn of the loop.

        Those of addresses that got answers before go before strangers, but for each eighth. Of them, the
        oldest goes first, as each gets its turn soon; of strangers, which may be any number, the newest, so
        that not all get theirs too late. Those of an address that has all its connections keep nobody else
        waiting.
        """
        last = _get_time()
        while True:
            await self._somebody_asks.wait()
            self._turn += 1
            least, most = BATCH
            admitted, batch, last = 0, int(ADMITTED * (_get_time() - last)), _get_time()
            batch = max(least, min(batch, most))
            self._full = False
            self._crowded.clear()
            known, strangers = deque(self._known.items()), [*self._strangers.items()]
            while (known or strangers) and admitted < batch and not self._full:
                is_known = known and (self._admitted % 8 or not strangers)
                client, peer = known.popleft() if is_known else strangers.pop()
                if _has_left(client, tls=tls is not None):
                    self._turn_away(client)
                elif peer in self._crowded or not self._has_place_of(peer):
                    self._crowded.add(peer)
                elif self._has_place():
                    self._forget_asking(client)
                    del self._outside[client]
                    self._open(client, peer, server, tls)
                    admitted += 1
                    self._admitted += 1
                else:
                    self._full = True
            if not self._strangers and not self._known:
                self._somebody_asks.clear()
            await asyncio.sleep(0 if admitted else ADMIT_S)

    def _has_place_of(self, peer: str) -> bool:
        """Whether an address may have one more connection, after another of its own gave way if need be."""
        if self._peers[peer] >= self._limits.peer:
            self._forget_closed()
        return self._peers[peer] < self._limits.peer or self._one_gives_way(lambda each: each.peer == peer)

    def _has_place(self) -> bool:
        """Whether there is a place for one more, after another gave way if need be."""
        if len(self._all) >= self._limits.clients:
            self._forget_closed()
        return len(self._all) < self._limits.clients or self._one_gives_way(lambda _: True)

    def _open(self, client: socket.socket, peer: str, server: web.Server, tls: ssl.SSLContext | None) -> None:
        """Give a connection to the server, after the handshake of TLS."""
        earlier = self._all.get(client.fileno())
        if earlier:  # it is closed, because its descriptor is free
            self._forget(earlier)
        connection = _Connection(client, peer, self._turn)
        self._all[connection.descriptor] = connection
        self._waiting[connection] = None
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
        with contextlib.suppress(OSError):  # the client has gone, or speaks no TLS
            transport, _ = await loop.connect_accepted_socket(server, connection.socket, ssl=tls)
            connection.close = transport.abort

    async def serve(self, server: web.Server, tls: ssl.SSLContext | None) -> None:
        """Let clients in, and drop those that are too slow, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._admit(server, tls))
            group.create_task(self._drop_slow())

    async def _drop_slow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for client, arrival in [*self._outside.items()]:
                if not self._asks(client) and _get_time() - arrival.since >= self._limits.slow_s:
                    self._turn_away(client)
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
        for client in [*self._outside]:
            self._turn_away(client)
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
        connection.pace = Pace(None, _get_time(), 0)  # it owes nothing
        self._waiting.pop(connection, None)
        try:
            response = await handler(request)
        finally:
            self._free_body(connection)
        if self._full or connection.peer in self._crowded:
            response.force_close()  # or its next request would come before those who wait
        return response

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
        self._answered_peers[connection.peer] = None
        self._answered_peers.move_to_end(connection.peer)
        if len(self._answered_peers) > KNOWN:
            self._answered_peers.popitem(last=False)
        self._free_body(connection)
        self._free_answer(connection)
        if self._all.get(connection.descriptor) is not connection:
            return
        self._waiting.pop(connection, None)
        self._waiting[connection] = None  # as the newest
        connection.asking, connection.idle, connection.held = False, True, False
        with contextlib.suppress(OSError):  # it is closed
            connection.pace = Pace.start(None, _get_time(), Traffic.of(connection.socket))

    def _one_gives_way(self, among: Callable[[_Connection], bool]) -> bool:
        """Drop the oldest connection without a whole request, or else one that reads its answer slowly."""
        for connection in filter(among, self._waiting):
            gives_way = not connection.sending if connection.idle else not self._is_young(connection)
            if gives_way:
                self._drop(connection)
                return True
        return self._slowest_gives_way(filter(among, self._all.values()))

    def _is_young(self, connection: _Connection) -> bool:
        return self._turn - connection.turn < YOUNG_TURNS or _get_time() - connection.opened < YOUNG_S

    def _slowest_gives_way(self, among: Iterable[_Connection]) -> bool:
        slowest = max(among, key=_Connection.slow_s, default=None)
        if slowest is None or slowest.slow_s() < SHORT_S:
            return False
        self._drop(slowest)
        return True

    def _drop(self, connection: _Connection) -> None:
        self._forget(connection)
        if not connection.gone:  # or the transport has no loop any more
            connection.close()

    def _forget_closed(self) -> None:
        """Forget the connections that their clients closed, if that was not done a moment ago."""
        if _get_time() - self._forgot_closed < MOMENT_S:
            return
        self._forgot_closed = _get_time()
        for connection in [each for each in self._all.values() if each.gone]:
            self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        if self._all.get(connection.descriptor) is connection:
            del self._all[connection.descriptor]
            self._peers[connection.peer] -= 1
            if not self._peers[connection.peer]:
                del self._peers[connection.peer]
        self._waiting.pop(connection, None)
        self._free_body(connection)
        self._free_answer(connection)


def _has_left(client: socket.socket, *, tls: bool) -> bool:
    """Whether a client would not read an answer; one who only sends no more could, but needs that for TLS."""
    state = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state == CLOSED or (tls and state == CLOSE_WAIT)


def _close_if_cancelled(client: socket.socket, opened: asyncio.Task[None]) -> None:
    if opened.cancelled():  # perhaps before it gave the connection to the loop
        client.close()


def _get_time() -> float:
    return asyncio.get_running_loop().time()
