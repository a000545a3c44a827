"""The address that a service listens on."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from imagematrix.errors import UsageError

__all__ = ["address"]


def address(listen: str) -> tuple[str, int]:
    """Return the address and the port in ADDRESS:PORT; raise UsageError if it is invalid."""
    try:
        parts = urlsplit(f"//{listen}")
        port = parts.port
        host = "127.0.0.1" if parts.hostname == "localhost" else str(parts.hostname)
        found = ipaddress.ip_address(host)
    except ValueError:
        raise _invalid(listen) from None
    if port is None:
        raise _invalid(listen)
    return str(found), port


def _invalid(listen: str) -> UsageError:
    return UsageError(f"invalid address {listen!r}: expected such as 127.0.0.1:5050")
