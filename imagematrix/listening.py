"""HTTP services: the address that a service listens on, and serving an application there.

A service has a limited number of connections, so that clients cannot take all of its memory and file
descriptors. Further clients wait in the kernel's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
from dataclasses import dataclass
from functools import partial
from weakref import WeakSet

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from imagematrix.authority import host_and_port
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

__all__ = ["Address", "listening"]

KEEP_S = 120.0  # for idle connections; clients in Go, such as engines, close theirs after 90
CLIENTS = 800  # connections at a time: four for each of 200 pulls; a process often may open 1,024 files
STALLED_S = 60.0  # after which a client that reads nothing is dropped
QUEUE = 128  # clients that the kernel lets wait
RETRY_S = 0.05  # between attempts to accept a client while there are too many
SPARE = 64  # closed connections to keep in mind, at least
IDLE_S = 1.0  # after which a connection without a request gives way to a waiting client


@dataclass(frozen=True, slots=True)
class Address:
    """An IP address and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address in ADDRESS:PORT; raise UsageError if it is invalid."""
        try:
            host, port = host_and_port(text)
            address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
        except ValueError:
            raise _invalid(text) from None
        if port is None:
            raise _invalid(text)
        return cls(str(address), port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@contextlib.asynccontextmanager
async def listening(
    application: web.Application,
    address: Address,
    *,
    grace_s: float = 0.0,
    tls: ssl.SSLContext | None = None,
    clients: int = CLIENTS,
    stalled_s: float = STALLED_S,
) -> AsyncIterator[Address]:
    """Serve an application; yield the address that it listens on, with the port chosen for port 0.

    It has at most `clients` connections at a time, and drops a client that reads nothing for `stalled_s`. At
    the end, requests in progress get `grace_s` more seconds, and then no connection is left. Raises
    UsageError if listening on the address fails.
    """
    logger = logging.getLogger(__name__)
    logger.addFilter(_of_ours)
    connections = _Connections(clients)
    application.middlewares.insert(0, connections.answering)
    runner = web.AppRunner(
        application,
        access_log=None,
        logger=logger,
        shutdown_timeout=grace_s,
        keepalive_timeout=KEEP_S,
        handler_cancellation=True,  # a client that has gone waits for nothing any more
    )
    await runner.setup()
    try:
        with _bound(address) as listener:
            accepting = asyncio.create_task(_accept(listener, runner, tls, connections, stalled_s))
            try:
                yield Address(*listener.getsockname()[:2])
            finally:
                accepting.cancel()
                await asyncio.gather(accepting, return_exceptions=True)
    finally:
        await runner.cleanup()
        await connections.end()


def _bound(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.create_server((address.host, address.port), family=family, backlog=QUEUE)
    except OSError as error:
        raise UsageError(f"cannot listen on {address}: {os.strerror(error.errno or 0)}") from error
    listener.setblocking(False)
    return listener


async def _accept(
    listener: socket.socket,
    runner: web.AppRunner,
    tls: ssl.SSLContext | None,
    connections: _Connections,
    stalled_s: float,
) -> None:
    loop, server = asyncio.get_running_loop(), runner.server
    assert server is not None  # noqa: S101 - the runner is set up; for the type checker
    opening: set[asyncio.Task[None]] = set()
    try:
        while True:
            if connections.full(server, len(opening)):
                await asyncio.sleep(RETRY_S)
                continue
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # the client has gone, or there are too many open files
                await asyncio.sleep(RETRY_S)
                continue
            # If the client's window stays closed for so long, the kernel ends the connection: tcp(7).
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * stalled_s))
            task = asyncio.create_task(connections.open(connection, server, tls))
            opening.add(task)
            task.add_done_callback(opening.discard)
            task.add_done_callback(partial(_close_if_cancelled, connection))
    finally:
        for task in opening:  # handshakes of TLS
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)


def _close_if_cancelled(connection: socket.socket, opened: asyncio.Task[None]) -> None:
    if opened.cancelled():  # perhaps before it gave the connection to the loop
        connection.close()


class _Connections:
    """The connections of a service, and since when each has no request; None while it has one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle: dict[asyncio.BaseProtocol, float | None] = {}
        self._transports: WeakSet[asyncio.Transport] = WeakSet()

    async def open(self, connection: socket.socket, server: web.Server, tls: ssl.SSLContext | None) -> None:
        """Give a connection to the server, after the handshake of TLS."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # the client has gone, or speaks no TLS
            transport, protocol = await loop.connect_accepted_socket(server, connection, ssl=tls)
            self._transports.add(transport)
            self._idle.setdefault(protocol, loop.time())

    async def end(self) -> None:
        """End what a closed server leaves: clients that do not answer the closing of TLS, or read nothing."""
        for transport in self._transports:
            transport.abort()
        await asyncio.sleep(0)  # the loop closes the sockets

    @web.middleware
    async def answering(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Note that a connection has a request, until the last byte of the answer is sent."""
        protocol, task = request.protocol, asyncio.current_task()
        assert task is not None  # noqa: S101 - for the type checker
        self._idle[protocol] = None
        # aiohttp sends the answer in the task of the request.
        task.add_done_callback(lambda _: self._ended(protocol))
        return await handler(request)

    def _ended(self, protocol: asyncio.BaseProtocol) -> None:
        self._idle[protocol] = asyncio.get_running_loop().time()

    def full(self, server: web.Server, opening: int) -> bool:
        """Whether there are too many connections; if so, make those without a request give way."""
        live, now = server.connections, asyncio.get_running_loop().time()
        if len(self._idle) > 2 * len(live) + SPARE:
            self._idle = {connection: self._idle.get(connection, now) for connection in live}
        if len(live) + opening < self._limit:
            return False
        for connection in live:
            since = self._idle.get(connection, now)
            if since is None:
                connection.close()  # after its answer
            elif now - since >= IDLE_S:
                connection.force_close()
        return True


def _of_ours(record: logging.LogRecord) -> bool:
    """Whether an error needs a traceback: scanners send junk, and docker begins every pull with TLS."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | ConnectionError))


def _invalid(text: str) -> UsageError:
    return UsageError(f"invalid address {text!r}: expected ADDRESS:PORT, such as 127.0.0.1:5050")
