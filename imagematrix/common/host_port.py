"""The host and port in the names and addresses that come from outside (the authority of RFC 3986).

Parsers of URLs disagree: what one takes for the host, another takes for a user, a path, or a number in
another base. This grammar admits only what all of them, and getaddrinfo(3), read alike.
"""

from __future__ import annotations

import re

LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"  # of a name in DNS; a label in another script is `xn--...`
BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
# getaddrinfo(3) takes a host whose last label is a number for an IPv4 address, as in 127.1 and 0x7f.0.0.1.
NUMBER = r"(?:[0-9]+|0x[0-9a-f]*)(?![a-z0-9.-])"
# Compiled at the first use: it takes as long as a few modules take to load, and a file's catalog needs none.
AUTHORITY = (
    rf"(\[[0-9a-f:.]+\]|{BYTE}(?:\.{BYTE}){{3}}|(?:{LABEL}\.)*(?!{NUMBER}){LABEL})(?::(0|[1-9][0-9]{{0,4}}))?"
)
LONGEST = 253  # characters of a name in DNS
PORTS = 65_535


def parse_host_port(text: str) -> tuple[str, int | None]:
    """Return the host in lower case and the port of HOST or HOST:PORT, None for an omitted port.

    A host is a name in DNS, an IPv4 address of four decimal numbers, or an IPv6 address in brackets without a
    zone. Raises ValueError for anything else.
    """
    match = re.fullmatch(AUTHORITY, text, re.ASCII | re.IGNORECASE)
    if match is None or len(match[1]) > LONGEST:
        raise ValueError(f"not a host with an optional port: {text[:200]!r}")
    host, port = match[1].lower(), int(match[2]) if match[2] else None
    if port is not None and port > PORTS:
        raise ValueError(f"not a port: {port}")
    if host.startswith("["):
        from ipaddress import IPv6Address  # few names have one

        host = f"[{IPv6Address(host[1:-1])}]"
    return host, port
