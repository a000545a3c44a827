"""HTTP services: the address that a service listens on, and serving an application there."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator

__all__ = ["Address", "listening"]

KEEP_S = 120.0  # for idle connections; clients in Go, such as engines, close theirs after 90


@dataclass(frozen=True, slots=True)
class Address:
    """An IP address and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address in ADDRESS:PORT; raise UsageError if it is invalid."""
        try:
            parts = urlsplit(f"//{text}")
            port = parts.port
            host = "127.0.0.1" if parts.hostname == "localhost" else str(parts.hostname)
            address = ipaddress.ip_address(host)
        except ValueError:
            raise _invalid(text) from None
        if port is None:
            raise _invalid(text)
        return cls(str(address), port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@contextlib.asynccontextmanager
async def listening(
    application: web.Application, address: Address, *, grace_s: float = 0.0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[list[Address]]:
    """Serve an application; yield the addresses that it listens on, with the port chosen for port 0.

    At the end, requests in progress get `grace_s` more seconds. Raises UsageError if listening on the address
    fails.
    """
    logger = logging.getLogger(__name__)
    logger.addFilter(_of_ours)
    runner = web.AppRunner(
        application, access_log=None, logger=logger, shutdown_timeout=grace_s, keepalive_timeout=KEEP_S
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, address.host, address.port, ssl_context=tls).start()
        except OSError as error:
            # asyncio puts the address into `strerror` again.
            raise UsageError(f"cannot listen on {address}: {os.strerror(error.errno or 0)}") from error
        yield [Address(*bound[:2]) for bound in runner.addresses]
    finally:
        await runner.cleanup()


def _of_ours(record: logging.LogRecord) -> bool:
    """Whether an error needs a traceback: scanners send junk, and docker begins every pull with TLS."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | ConnectionError))


def _invalid(text: str) -> UsageError:
    return UsageError(f"invalid address {text!r}: expected ADDRESS:PORT, such as 127.0.0.1:5050")
