"""The connections of a service: how many there are, what memory they take, and which of them give way.

A client that connects waits *outside*, and nothing is read from it, until it begins to send and there is a
place for it. Its connection is *asking* until the request is whole: during the handshake of TLS, the head and
the body. Then the service answers it, and afterwards it is idle.

When there is no place for a new client, the oldest connection without a whole request gives way, unless it is
young: in a flood of new clients, each connection would give way to the next before its request could be
whole. A connection whose request is whole gets its answer, unless its client reads too slowly.
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
    from collections.abc import Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

LOOK_S = 0.5  # between looks at the pace of clients
SHORT_S = 0.5  # for which a client may be slow while others wait for its place
MOMENT_S = 0.05  # between looks for closed connections
YOUNG_S, YOUNG_TURNS = 0.25, 12  # of the loop: enough for a handshake and a request in a flood of them
KNOWN = 1_024  # addresses that got answers, to remember
OUTSIDE = 2_048  # clients that wait for a place, but no more than half of the files that may be open
ADMIT_S = 0.02  # between looks for a place for those outside
BATCH = 16  # clients to admit in a turn of the loop: with more, all of them wait longer for its next turn
RECORD = 5  # bytes of the head of a record of TLS: its type, a version, and its length (RFC 8446, 5.1)
HANDSHAKE = b"\x16"  # the type of a client's first record
CLOSED, CLOSE_WAIT = 7, 8  # of include/net/tcp_states.h
BUSY = 0.25  # of all places: with more clients, no time is left for the rest of a refused body
SMALL = 1 << 16  # bytes of a body that take no room: less than the buffers of a connection

# Each request has a context of its own, which timers may keep for seconds after the answer.
_CONNECTION: ContextVar[_Connection] = ContextVar("connection")
_RESERVE: ContextVar[Callable[[int], None]] = ContextVar("keep")


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
    """Reserve memory for the answer to the request at hand, in bytes, until it is sent.

    Raises HTTPTooManyRequests if clients that read fast enough have all of it.
    """
    _RESERVE.get()(size)


def read_body() -> bytes:
    """Return the body of the request at hand."""
    return _CONNECTION.get().body


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A client outside: its IP address, and since when it is here."""

    peer: str
    since: float


class _Connection:
    """A connection, and what it has of the service.

    It was admitted in the turn `turn` of the loop. `close` ends it at once. It has the `body` of the request
    that is being answered. `body_size` are the bytes that its body takes of the room for bodies, and
    `awaits_room` is set while it waits for them. Its answer keeps `answer_size` bytes.
    """

    def __init__(self, client: socket.socket, peer: str, turn: int) -> None:
        self.turn = turn
        self.socket, self.peer, self.descriptor = client, peer, client.fileno()
        self.is_asking, self.is_idle, self.awaits_room = True, False, False
        self.body, self.body_size, self.answer_size = b"", 0, 0
        self.close: Callable[[], object] = partial(_shut_down, client)
        self.opened = _get_time()
        self.pace = Pace(None, self.opened, 0)

    @property
    def is_closed(self) -> bool:
        return self.socket.fileno() < 0

    @property
    def is_sending(self) -> bool:
        """Whether an answer is still queued for the client."""
        try:
            return Traffic.measure(self.socket).queued > 0
        except OSError:  # it is closed
            return False

    def update_pace(self, least: float) -> None:
        """See how far the client has come; an idle client that sends something begins a request.

        Raises OSError if the connection is closed.
        """
        traffic = Traffic.measure(self.socket)
        self.is_asking = self.is_asking or (self.is_idle and traffic.received > self.pace.moved)
        asking = self.is_asking and not self.awaits_room
        self.pace = self.pace.update(_get_time(), traffic, asking=asking, least=least)

    def get_slow_s(self, now: float) -> float:
        return self.pace.get_slow_s(now) if self.pace.owed else 0.0


class Connections:
    """The connections of a service, within its limits. To be used in one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._turn = 0  # of those in which clients may be admitted
        self._all: dict[int, _Connection] = {}  # by file descriptor
        self._unfinished: dict[_Connection, None] = {}  # those without a whole request, the oldest first
        self._slow: list[_Connection] = []  # those that owed something at the last look, the slowest first
        self._answer_bytes = 0  # that all answers keep
        self._forgot_closed = -math.inf  # when closed connections were last looked for
        self._peers: Counter[str] = Counter()
        self._body_bytes = 0  # that are taken of the room for bodies
        self._room_freed = asyncio.Event()
        self._opening: set[asyncio.Task[None]] = set()
        self._outside: dict[socket.socket, _Arrival] = {}  # the newest last
        self._most_outside = min(OUTSIDE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._strangers: dict[socket.socket, str] = {}  # those of them that ask, with their addresses
        # The same, by address, of those addresses that got answers before; the next in turn is first.
        self._known: OrderedDict[str, dict[socket.socket, None]] = OrderedDict()
        self._answered_peers: OrderedDict[str, None] = OrderedDict()  # the newest last
        self._admitted = 0  # in all
        self._somebody_asks = asyncio.Event()
        self._crowded: set[str] = set()  # addresses of which some wait because they have all their places
        self._full = False  # so that some wait of any address

    def add_client(self, client: socket.socket, peer: str, *, tls: bool) -> None:
        """Take a new client from an IP address; it waits outside until it asks and has a place."""
        if len(self._outside) >= self._most_outside:  # the oldest goes that asks nothing
            silent = (outsider for outsider in self._outside if not self._is_asking(outsider))
            self._turn_away(next(silent, next(iter(self._outside))))
        self._outside[client] = _Arrival(peer, _get_time())
        if tls:
            self._await_bytes(client, RECORD, self._await_record)
        else:
            self._await_bytes(client, 1, self._note_asking)

    def _await_bytes(
        self, client: socket.socket, size: int, on_sent: Callable[[socket.socket], None]
    ) -> None:
        """Call `on_sent` when a client has sent `size` bytes, or sends no more."""
        with contextlib.suppress(OSError):  # reading it tells
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
        self._loop.add_reader(client, on_sent, client)

    def _await_record(self, client: socket.socket) -> None:
        """Wait until the first record of TLS is whole; until then, a client costs nothing more."""
        head = b""
        with contextlib.suppress(OSError):  # as above
            head = client.recv(RECORD, socket.MSG_PEEK)
        if head[:1] == HANDSHAKE:
            self._await_bytes(client, RECORD + int.from_bytes(head[3:]), self._note_asking)
        else:  # it speaks no TLS, or has gone
            self._note_asking(client)

    def _note_asking(self, client: socket.socket) -> None:
        """Note that a client asks."""
        self._loop.remove_reader(client)
        with contextlib.suppress(OSError):  # as above
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        peer = self._outside[client].peer
        if peer in self._answered_peers:
            self._known.setdefault(peer, {})[client] = None
        else:
            self._strangers[client] = peer
        self._somebody_asks.set()

    def _turn_away(self, client: socket.socket) -> None:
        self._forget_asking(client)
        del self._outside[client]
        self._loop.remove_reader(client)
        client.close()

    def _is_asking(self, client: socket.socket) -> bool:
        return client in self._strangers or client in self._known.get(self._outside[client].peer, ())

    def _forget_asking(self, client: socket.socket) -> None:
        self._strangers.pop(client, None)
        peer = self._outside[client].peer
        self._known.get(peer, {}).pop(client, None)
        if not self._known.get(peer):
            self._known.pop(peer, None)

    async def _admit(self, server: web.Server, tls: ssl.SSLContext | None) -> None:
        """Give places to the clients that ask, a few in each turn of the loop.

        Known addresses, which got answers before, go before strangers, except that every eighth place is for
        a stranger. They get places in turns. Of one address, and of all strangers, the newest client goes
        first: in a flood, with the oldest first, all would get their turn too late. An address that has all
        its connections does not hold up the others.
        """
        while True:
            await self._somebody_asks.wait()
            self._turn += 1
            admitted = 0
            self._full = False
            self._crowded.clear()
            known, strangers = deque(self._known), [*self._strangers.items()]
            while (known or strangers) and admitted < BATCH and not self._full:
                is_known = bool(known) and (self._admitted % 8 > 0 or not strangers)
                if is_known:
                    peer = known.popleft()
                    client = next(reversed(self._known[peer]))
                else:
                    client, peer = strangers.pop()
                # A client that only sends no more could read an answer, but would have to send for TLS.
                state = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
                if state == CLOSED or (tls is not None and state == CLOSE_WAIT):
                    self._turn_away(client)
                elif peer in self._crowded or not self._make_place_for(peer):
                    self._crowded.add(peer)
                elif self._make_place():
                    self._forget_asking(client)
                    del self._outside[client]
                    self._open_connection(client, peer, server, tls)
                    admitted += 1
                    self._admitted += 1
                    if peer in self._known:
                        self._known.move_to_end(peer)
                else:
                    self._full = True
                if is_known and peer in self._known and peer not in self._crowded:
                    known.append(peer)
            if not self._strangers and not self._known:
                self._somebody_asks.clear()
            await asyncio.sleep(0 if admitted else ADMIT_S)

    def _make_place_for(self, peer: str) -> bool:
        """Let a connection of an address give way if it has all of its own; return False if none can."""
        if self._peers[peer] >= self._limits.peer:
            self._forget_closed()
        if self._peers[peer] < self._limits.peer:
            return True
        return self._drop_one(lambda connection: connection.peer == peer)

    def _make_place(self) -> bool:
        """Let another connection give way if there is no place for one more; return False if none can."""
        if len(self._all) >= self._limits.clients:
            self._forget_closed()
        return len(self._all) < self._limits.clients or self._drop_one(lambda _: True)

    def _open_connection(
        self, client: socket.socket, peer: str, server: web.Server, tls: ssl.SSLContext | None
    ) -> None:
        """Give a connection to the server, after the handshake of TLS."""
        earlier = self._all.get(client.fileno())
        if earlier:  # it is closed, because its descriptor is free
            self._forget(earlier)
        connection = _Connection(client, peer, self._turn)
        self._all[connection.descriptor] = connection
        self._unfinished[connection] = None
        self._peers[peer] += 1
        task = asyncio.create_task(self._shake_hands(connection, server, tls))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _shake_hands(
        self, connection: _Connection, server: web.Server, tls: ssl.SSLContext | None
    ) -> None:
        try:
            transport, _ = await self._loop.connect_accepted_socket(server, connection.socket, ssl=tls)
        except OSError as error:  # the client has gone, or speaks no TLS
            # Asyncio's frames in the traceback hold the future that holds the error: 256 KiB of buffers for
            # each client, until the collector of garbage finds the cycle.
            error.__traceback__ = None
            return
        connection.close = transport.abort
        if not self._is_current(connection):  # it was dropped meanwhile
            transport.abort()

    async def serve(self, server: web.Server, tls: ssl.SSLContext | None) -> None:
        """Let clients in, and drop those that are too slow, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._admit(server, tls))
            group.create_task(self._drop_slow())

    async def _drop_slow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for client, arrival in [*self._outside.items()]:
                if not self._is_asking(client) and _get_time() - arrival.since >= self._limits.slow_s:
                    self._turn_away(client)
            for connection in [*self._all.values()]:
                try:
                    connection.update_pace(self._limits.least)
                except OSError:  # it is closed
                    self._forget(connection)
                else:
                    if connection.get_slow_s(_get_time()) >= self._limits.slow_s:
                        self._drop(connection)
            # It changes only here that a connection is slow, and whoever needs a place asks for the slowest:
            # among all connections, that would take longer than to answer a request.
            slow = [connection for connection in self._all.values() if connection.pace.owed]
            self._slow = sorted(slow, key=lambda connection: connection.pace.since)

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
    async def answer_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Read the whole request, and note that it has to be answered until the last byte is sent."""
        client = request.transport and request.transport.get_extra_info("socket")
        connection = self._all.get(client.fileno()) if client else None
        if connection is None:
            raise ConnectionResetError("the client has gone")
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - for the type checker
        # aiohttp sends the answer in the task of the request.
        task.add_done_callback(lambda _: self._note_answered(connection))
        connection.is_asking, connection.is_idle = True, False
        _RESERVE.set(partial(self._reserve_answer, connection))
        _CONNECTION.set(connection)
        response: web.StreamResponse
        try:
            connection.body = await self._read_body(connection, request)
            connection.is_asking = False
            connection.pace = Pace(None, _get_time(), 0)  # it owes nothing
            self._unfinished.pop(connection, None)
            response = await handler(request)
        except web.HTTPException as error:
            # The request has its route's error, and aiohttp would answer with it. As the traceback has the
            # request in its frames, all of the connection would stay until the collector of garbage comes.
            error.__traceback__ = None
            response = web.Response(
                status=error.status, reason=error.reason, headers=error.headers, body=error.body
            )
        finally:
            self._free_body(connection)
        if self._full or connection.peer in self._crowded:
            response.force_close()  # or its next request would come before those who wait
        is_busy = len(self._all) + len(self._outside) > BUSY * self._limits.clients
        if is_busy and not request.content.is_eof():
            # To read the rest of a refused body takes as much time as several other requests.
            protocol = request.protocol
            task.add_done_callback(lambda _: protocol.force_close())
        return response

    def _reserve_answer(self, connection: _Connection, size: int) -> None:
        while self._answer_bytes + size > self._limits.answers:
            if not self._drop_slowest(lambda connection: connection.answer_size > 0):
                reading = sum(connection.answer_size > 0 for connection in self._all.values())
                raise web.HTTPTooManyRequests(text=f"{reading} answers are being read: try again later")
        connection.answer_size += size
        self._answer_bytes += size

    async def _read_body(self, connection: _Connection, request: web.Request) -> bytes:
        if not request.body_exists:
            return b""
        size = self._limits.body if request.content_length is None else request.content_length
        if size > self._limits.body:
            raise web.HTTPRequestEntityTooLarge(self._limits.body, size)
        if size > SMALL:  # it waits for room; the oldest connection whose body is not whole gives way
            connection.awaits_room = True
            while self._body_bytes + size > self._limits.bodies:
                oldest = next((waiting for waiting in self._unfinished if waiting.body_size), None)
                if oldest:
                    self._drop(oldest)
                else:  # all are whole, and will be answered
                    self._room_freed.clear()
                    await self._room_freed.wait()
            connection.awaits_room, connection.body_size = False, size
            self._body_bytes += size
        body = bytearray()
        async for piece in request.content.iter_any():
            body += piece
            if len(body) > self._limits.body:
                raise web.HTTPRequestEntityTooLarge(self._limits.body, len(body))
        return bytes(body)

    def _free_body(self, connection: _Connection) -> None:
        self._body_bytes -= connection.body_size
        connection.body, connection.body_size = b"", 0
        self._room_freed.set()

    def _free_answer(self, connection: _Connection) -> None:
        self._answer_bytes -= connection.answer_size
        connection.answer_size = 0

    def _note_answered(self, connection: _Connection) -> None:
        """Note that an answer is sent, or that its client has gone: what it kept is free, and it is idle."""
        self._answered_peers[connection.peer] = None
        self._answered_peers.move_to_end(connection.peer)
        if len(self._answered_peers) > KNOWN:
            self._answered_peers.popitem(last=False)
        self._free_body(connection)
        self._free_answer(connection)
        if not self._is_current(connection):
            return
        self._unfinished.pop(connection, None)
        self._unfinished[connection] = None  # as the newest
        connection.is_asking, connection.is_idle, connection.awaits_room = False, True, False
        with contextlib.suppress(OSError):  # it is closed
            connection.pace = Pace.start(None, _get_time(), Traffic.measure(connection.socket))

    def _drop_one(self, is_eligible: Callable[[_Connection], bool]) -> bool:
        """Drop the oldest connection without a whole request, or else one that reads its answer slowly."""
        for connection in filter(is_eligible, self._unfinished):
            if connection.is_idle:
                gives_way = not connection.is_sending
            else:  # unless it is young
                in_turns = self._turn - connection.turn >= YOUNG_TURNS
                gives_way = in_turns and _get_time() - connection.opened >= YOUNG_S
            if gives_way:
                self._drop(connection)
                return True
        return self._drop_slowest(is_eligible)

    def _drop_slowest(self, is_eligible: Callable[[_Connection], bool]) -> bool:
        """Drop the connection that has been slow for longest; return False if none is slow."""
        now = _get_time()
        for connection in self._slow:
            is_slow = connection.get_slow_s(now) >= SHORT_S
            if is_slow and self._is_current(connection) and is_eligible(connection):
                self._drop(connection)
                return True
        return False

    def _drop(self, connection: _Connection) -> None:
        self._forget(connection)
        if not connection.is_closed:  # or the transport has no loop any more
            connection.close()

    def _forget_closed(self) -> None:
        """Forget the connections that their clients closed, if that was not done a moment ago."""
        if _get_time() - self._forgot_closed < MOMENT_S:
            return
        self._forgot_closed = _get_time()
        for connection in [*self._all.values()]:
            if connection.is_closed:
                self._forget(connection)

    def _is_current(self, connection: _Connection) -> bool:
        """Whether a connection was neither forgotten nor dropped."""
        return self._all.get(connection.descriptor) is connection

    def _forget(self, connection: _Connection) -> None:
        if self._is_current(connection):
            del self._all[connection.descriptor]
            self._peers[connection.peer] -= 1
            if not self._peers[connection.peer]:
                del self._peers[connection.peer]
        self._unfinished.pop(connection, None)
        self._free_body(connection)
        self._free_answer(connection)


def _shut_down(client: socket.socket) -> None:
    """End a connection whose handshake may have begun, so that whoever reads it comes to its end.

    The loop closes the socket. If it were closed here, the loop could still have a transport of it, and would
    refuse the next client, which gets the same descriptor.
    """
    with contextlib.suppress(OSError):  # the client has gone
        client.shutdown(socket.SHUT_RDWR)


def _get_time() -> float:
    return asyncio.get_running_loop().time()
