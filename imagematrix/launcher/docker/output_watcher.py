"""The last lines of a container's output, read from the engine while docker's command runs, or afterwards."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import threading
import time

from imagematrix.errors import EngineError
from imagematrix.images.engine import containers, transport

KEPT = 64 * 1024  # bytes
LINES = 500  # requested of a log, at most
EVERY_S = 0.25  # between two reads
AT_ONCE = KEPT  # bytes in one read: a container that writes more is too fast to follow
TIMEVAL = struct.Struct("ll")  # struct timeval of the C library
PATIENCE_S = 2  # to read the last output of a container
# Frame header of a container without a terminal: stream and length (POST attach in Docker's Engine API).
HEADER = re.compile(rb"[\x01\x02]\0\0\0[\0-\xff]{4}")


class OutputWatcher:
    """The output of the container with `label` (NAME=VALUE), and its id.

    `since` is a time before its start, in seconds since 1970. `removed` states that the engine removes the
    log when the container ends: the log is then read while it runs. A log can have gigabytes, so if it grows
    fast, it is not read whole, but reopened at its end again and again.

    `container` is the id, None until it is known, or if the engine is not at a local socket.
    """

    def __init__(self, label: str, since: float, *, removed: bool) -> None:
        self._label = label
        self._since = int(since)
        self._removed = removed
        self.container: str | None = None
        self._output = b""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch_container, daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def get_last_lines(self) -> list[str]:
        """Return the last lines of the ended container's output, as far as the engine still has them."""
        with contextlib.suppress(EngineError):  # without the output, there is only no diagnosis
            if not self._removed:
                self._output = containers.read_log_tail(self._label, LINES)
        self._ended.set()
        self._thread.join(PATIENCE_S)
        output = self._output
        # What is read while the container runs begins with the answer's head, unless that was cut off.
        if output.startswith(b"HTTP/"):
            output = output.partition(b"\r\n\r\n")[2]
        return HEADER.sub(b"", output[-KEPT:]).decode("utf-8", "replace").splitlines()

    def _watch_container(self) -> None:
        # The engine may answer anything, or end: docker's command reports that, and this thread only watches.
        with contextlib.suppress(EngineError, OSError, ValueError, LookupError, TypeError):
            filters = transport.make_filters(type=["container"], event=["start"], label=[self._label])
            engine = transport.open_local_socket()
            if engine is None:
                return
            with engine.open_response(f"/events?since={self._since}&{filters}") as connection:
                connection.settimeout(None)  # the container may start much later: its image is pulled first
                with connection.makefile("rb") as lines:
                    while lines.readline().strip():
                        pass  # the head
                    container = str(json.loads(lines.readline())["Actor"]["ID"])
            self.container = container
            if self._removed and container:
                self._follow_log(container)

    def _follow_log(self, container: str) -> None:
        connection = self._open_log(container)
        try:
            while not self._ended.wait(EVERY_S):
                output, ended = _receive_available(connection)
                self._output = (self._output + output)[-KEPT:]
                if ended:
                    return
                if len(output) >= AT_ONCE:
                    reopened = self._open_log(container)
                    connection.close()
                    connection, self._output = reopened, b""
            self._output += _receive_rest(connection)
        finally:
            connection.close()

    def _open_log(self, container: str) -> socket.socket:
        query = f"stdout=1&stderr=1&follow=1&tail={LINES}"
        engine = transport.open_local_socket()
        if engine is None:
            raise EngineError("the engine is no longer at a local socket")
        return engine.open_response(f"/containers/{container}/logs?{query}")


def _receive_available(connection: socket.socket) -> tuple[bytes, bool]:
    """Return the bytes available now, up to AT_ONCE, and whether the stream has ended."""
    connection.setblocking(False)
    received = b""
    try:
        while len(received) < AT_ONCE:
            chunk = connection.recv(KEPT)
            if not chunk:
                return received, True
            received += chunk
    except BlockingIOError:
        pass
    return received, False


def _receive_rest(connection: socket.socket) -> bytes:
    """Return the end of the stream, as far as it arrives in time."""
    deadline = time.monotonic() + PATIENCE_S
    # Each line arrives on its own; blocking for a full buffer is cheaper than one call per line.
    connection.setblocking(True)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, TIMEVAL.pack(int(PATIENCE_S), 0))
    received = b""
    while time.monotonic() < deadline:
        chunk = connection.recv(KEPT, socket.MSG_WAITALL)
        received = (received + chunk)[-KEPT:]
        if len(chunk) < KEPT:
            break
    return received
