"""The last lines of a container, read from the engine while docker's command runs it, or afterwards."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import threading
import time

from imagematrix import engine
from imagematrix.errors import EngineError

__all__ = ["Watch"]

KEPT = 64 * 1024  # bytes
LINES = 500  # that are asked for of a log, at most
EVERY_S = 0.25  # between two looks
AT_ONCE = KEPT  # bytes in one look: who writes more is too fast to be followed
TIMEVAL = struct.Struct("ll")  # of the C library
PATIENCE_S = 2  # to read what a container said at its end
# Before each piece, where the container has no terminal: the stream, and the length (POST attach in Docker's
# Engine API).
HEADER = re.compile(rb"[\x01\x02]\0\0\0[\0-\xff]{4}")


class Watch:
    """What the container with `label` (NAME=VALUE) says, and its id.

    `since` is the time, in seconds since 1970, before which nobody can have started it. `removed` says that
    its log is gone when it has ended: then the log is held open meanwhile. It is not followed, because a log
    may have gigabytes: of one that grows fast, the end is opened again and again.

    `container` is the id, None until it is known, and where the engine is not at a local socket.
    """

    def __init__(self, label: str, since: float, *, removed: bool) -> None:
        self._label = label
        self._since = int(since)
        self._removed = removed
        self.container: str | None = None
        self._said = b""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def last_lines(self) -> list[str]:
        """Return what the container that has ended said last, as far as an engine could tell."""
        with contextlib.suppress(EngineError):
            if not self._removed:
                self._said = engine.last_said(self._label, LINES)
        self._ended.set()
        self._thread.join(PATIENCE_S)
        said = self._said.partition(b"\r\n\r\n")[2] if self._said.startswith(b"HTTP/") else self._said
        return HEADER.sub(b"", said[-KEPT:]).decode("utf-8", "replace").splitlines()

    def _look(self) -> None:
        with contextlib.suppress(EngineError, OSError, ValueError, LookupError, TypeError):
            self.container = self._started()
            if self._removed and self.container:
                self._hold(self.container)

    def _started(self) -> str | None:
        filters = {"type": ["container"], "event": ["start"], "label": [self._label]}
        connection = engine.connected(
            f"/events?since={self._since}&filters={engine.quote(json.dumps(filters))}"
        )
        if connection is None:
            return None
        with connection:
            connection.settimeout(None)
            with connection.makefile("rb") as lines:
                while lines.readline().strip():
                    pass  # the head
                return str(json.loads(lines.readline())["Actor"]["ID"])

    def _hold(self, container: str) -> None:
        connection = self._opened(container)
        try:
            while not self._ended.wait(EVERY_S):
                said, is_all = _received(connection)
                self._said = (self._said + said)[-KEPT:]
                if is_all:
                    return
                if len(said) >= AT_ONCE:
                    following = self._opened(container)
                    connection.close()
                    connection, self._said = following, b""
            self._said += _rest(connection)
        finally:
            connection.close()

    def _opened(self, container: str) -> socket.socket:
        query = f"stdout=1&stderr=1&follow=1&tail={LINES}"
        connection = engine.connected(f"/containers/{container}/logs?{query}")
        if connection is None:
            raise EngineError("the engine is not at a local socket any more")
        return connection


def _received(connection: socket.socket) -> tuple[bytes, bool]:
    """Return what has come by now, up to AT_ONCE, and whether that was the end."""
    connection.setblocking(False)
    said = b""
    try:
        while len(said) < AT_ONCE:
            more = connection.recv(KEPT)
            if not more:
                return said, True
            said += more
    except BlockingIOError:
        pass
    return said, False


def _rest(connection: socket.socket) -> bytes:
    """Return the end of what is still to come, as far as it comes in time."""
    deadline = time.monotonic() + PATIENCE_S
    # Each line comes by itself, and to be called for each takes longer than to read them.
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, TIMEVAL.pack(int(PATIENCE_S), 0))
    said = b""
    while time.monotonic() < deadline:
        more = connection.recv(KEPT, socket.MSG_WAITALL)
        said = (said + more)[-KEPT:]
        if len(more) < KEPT:
            break
    return said
