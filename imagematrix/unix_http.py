"""Plain HTTP over a Unix socket, for requests that must take less time than importing a client."""

from __future__ import annotations

import _socket  # the core of `socket`, which takes longer to import than most requests take

from imagematrix.errors import EngineError

__all__ = ["ANSWER_S", "get", "quote", "request"]

ANSWER_S = 30  # seconds without data: milliseconds, unless dozens launch at once
RESPONSE_LIMIT = 256 * 1024 * 1024  # bytes


def request(path: str, resource: str, answer_s: float | None = None) -> _socket.socket:
    """Return a connection to the socket `path` on which `resource` was requested; raise OSError."""
    # HTTP/1.0 has neither chunks nor keep-alive: the body ends when the engine closes the connection.
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connection.settimeout(ANSWER_S if answer_s is None else answer_s)
        connection.connect(path)
        connection.sendall(f"GET {resource} HTTP/1.0\r\nHost: docker\r\n\r\n".encode())
    except BaseException:
        connection.close()
        raise
    return connection


def get(path: str, resource: str, answer_s: float | None = None) -> tuple[bytes, bytes]:
    """Return head and body of the response for `resource` at the socket `path`.

    `answer_s` is the timeout without data, by default ANSWER_S. Raises OSError, and EngineError if the
    response is too large.
    """
    connection = request(path, resource, answer_s)
    try:
        chunks = []
        size = 0
        while chunk := connection.recv(1 << 16):
            chunks.append(chunk)
            size += len(chunk)
            if size > RESPONSE_LIMIT:
                raise EngineError(f"response of the engine exceeds {RESPONSE_LIMIT // 2**20} MiB")
    finally:
        connection.close()
    head, _, body = b"".join(chunks).partition(b"\r\n\r\n")
    return head, body


def quote(text: str) -> str:
    """Return `text` percent-encoded for a query."""
    # Like urllib.parse.quote, without the milliseconds that importing urllib takes.
    return "".join(
        char if char.isalnum() and char.isascii() else "".join(f"%{byte:02X}" for byte in char.encode())
        for char in text
    )
