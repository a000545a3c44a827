"""HTTP services: the address that a service listens on, and serving an application there.

What clients can take of a service is limited, by the module `connections`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ipaddress
import logging
import os
import resource
import socket
import sys
from asyncio.selector_events import _SelectorTransport  # type: ignore[attr-defined]
from asyncio.sslproto import SSLProtocol
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from imagematrix.common.host_port import parse_host_port
from imagematrix.common.process_limits import set_limit_if_allowed
from imagematrix.errors import UsageError
from imagematrix.integrations.http_service.connections import Connections, Limits
from imagematrix.integrations.http_service.garbage import collect_often

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

KEEP_S = 120.0  # for idle connections; clients in Go, such as engines, close theirs after 90
LINGER_S = 1.0  # for which the rest of a refused body is read, so that its client reads the refusal
QUEUE = 4_096  # clients that the kernel lets wait: a lost one comes again only after a second
BATCH = 512  # clients to accept before others get their turn
RETRY_S = 0.05  # after a client that could not be accepted
SWITCH_S = 0.0005  # for which a busy event loop keeps other threads waiting after each of their calls
FILES = 4_096  # for clients, and what is read for them
MAPPED = 1 << 17  # bytes of a block
M_MMAP_THRESHOLD = -3  # in malloc.h
SENDING = 1 << 17  # bytes that the kernel queues for a client
RECEIVING = 1 << 16  # and from it, and that are read at once: TLS has several such buffers


@dataclass(frozen=True, slots=True)
class Address:
    """An IP address and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address in ADDRESS:PORT; raise UsageError if it is invalid."""
        try:
            host, port = parse_host_port(text)
            address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
        except ValueError:
            raise _make_address_error(text) from None
        if port is None:
            raise _make_address_error(text)
        return cls(str(address), port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@contextlib.asynccontextmanager
async def serve_http(
    application: web.Application,
    address: Address,
    *,
    grace_s: float = 0.0,
    tls: ssl.SSLContext | None = None,
    limits: Limits | None = None,
) -> AsyncIterator[Address]:
    """Serve an application; yield the address that it listens on, with the port chosen for port 0.

    At the end, requests in progress get `grace_s` more seconds, and then no connection is left. Raises
    UsageError if listening on the address fails.
    """
    _prepare_process()
    collect_often()
    logger = logging.getLogger(__name__)
    logger.addFilter(_is_unexpected)
    connections = Connections(limits or Limits())
    application.middlewares.insert(0, connections.answer_request)
    runner = web.AppRunner(
        application,
        access_log=None,
        logger=logger,
        shutdown_timeout=grace_s,
        keepalive_timeout=KEEP_S,
        lingering_time=LINGER_S,
        auto_decompress=False,  # a body would have other limits than its bytes
        handler_cancellation=True,  # a client that has gone waits for nothing any more
    )
    await runner.setup()
    server = runner.server
    assert server is not None  # noqa: S101 - the runner is set up; for the type checker
    try:
        with _bind_socket(address) as listener:
            try:
                async with asyncio.TaskGroup() as group:  # a service that lets nobody in any more ends
                    tasks = [
                        group.create_task(_accept_clients(listener, connections, tls=tls is not None)),
                        group.create_task(connections.serve(server, tls)),
                    ]
                    try:
                        yield Address(*listener.getsockname()[:2])
                    finally:
                        for task in tasks:
                            task.cancel()
            except BaseExceptionGroup as group_error:
                # Whoever handles errors, such as that of another port in use, knows them without a group.
                raise group_error.exceptions[0] from None
    finally:
        await runner.cleanup()
        await connections.end()


def _prepare_process() -> None:
    """Let this process open more files, and give memory back to the system.

    The limit of open files is often 1,024, for old programs. Large blocks are mapped on their own by malloc,
    so that the system has their memory back when they are freed. Otherwise the size from which malloc does
    that grows to that of the bodies and answers that were freed, and the blocks of later ones lie between
    small ones that stay: glibc's mallopt(3), M_MMAP_THRESHOLD. So asyncio gets smaller buffers than its own
    of 256 KiB: to map one for each read takes four times as long as to read.
    """
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < FILES:
        set_limit_if_allowed(resource.RLIMIT_NOFILE, FILES)
    sys.setswitchinterval(SWITCH_S)
    _SelectorTransport.max_size = SSLProtocol.max_size = RECEIVING
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED)


def _bind_socket(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.create_server((address.host, address.port), family=family, backlog=QUEUE)
    except OSError as error:
        raise UsageError(f"cannot listen on {address}: {os.strerror(error.errno or 0)}") from error
    listener.setblocking(False)
    # The sockets of accepted clients inherit these.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENDING)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVING)
    return listener


async def _accept_clients(listener: socket.socket, connections: Connections, *, tls: bool) -> None:
    loop, accepted = asyncio.get_running_loop(), 0
    while True:
        try:
            client, (peer, *_) = await loop.sock_accept(listener)
        except OSError:  # the client has gone, or there are too many open files
            await asyncio.sleep(RETRY_S)
            continue
        connections.add_client(client, peer, tls=tls)
        accepted += 1
        if accepted % BATCH == 0:  # a client that waits already is accepted without a pause
            await asyncio.sleep(0)


def _is_unexpected(record: logging.LogRecord) -> bool:
    """Whether an error needs a traceback: scanners send junk, and docker begins every pull with TLS."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | ConnectionError))


def _make_address_error(text: str) -> UsageError:
    return UsageError(f"invalid address {text!r}: expected ADDRESS:PORT, such as 127.0.0.1:5050")
