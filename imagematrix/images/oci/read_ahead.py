"""Reading a stream ahead in a thread, so that what makes its bytes and what uses them run side by side.

Decompressing, hashing and receiving release Python's lock, so both sides get a processor.
"""

from __future__ import annotations

import contextlib
import queue
import threading

from imagematrix.images.oci.byte_stream import PIECE, read_exactly

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.images.oci.byte_stream import ByteStream

AHEAD = 4  # pieces that wait for their reader, at most


@contextlib.contextmanager
def read_ahead(stream: ByteStream) -> Iterator[ByteStream]:
    """Yield the content of `stream`, which a thread reads at most AHEAD pieces of 1 MiB ahead.

    Its `read` returns what is there, up to the wanted size, and raises what `stream` raises. After the
    context nobody reads from `stream`.
    """
    ahead = _AheadStream(stream)
    thread = threading.Thread(target=ahead.fill, name="read ahead", daemon=True)
    thread.start()
    try:
        yield ahead
    finally:
        ahead.stop()
        thread.join()


class _AheadStream:
    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._room = threading.Semaphore(AHEAD)
        self._pieces: queue.SimpleQueue[bytes | BaseException] = queue.SimpleQueue()
        self._stopped = self._ended = False
        self._rest = memoryview(b"")

    def fill(self) -> None:
        """Read to the end, or until it is stopped."""
        piece = None
        try:
            while piece != b"" and self._room.acquire() and not self._stopped:
                piece = self._stream.read(PIECE)
                self._pieces.put(piece)
        except BaseException as error:  # noqa: BLE001 - raised by who reads
            self._pieces.put(error)

    def stop(self) -> None:
        self._stopped = True
        self._room.release()

    def read(self, size: int = -1, /) -> bytes:
        if size < 0:
            return read_exactly(self._read_part, size)
        return self._read_part(size)

    def _read_part(self, size: int) -> bytes:
        if not self._rest and not self._ended:
            piece = self._pieces.get()
            self._room.release()
            self._ended = not isinstance(piece, bytes) or not piece
            if isinstance(piece, BaseException):
                raise piece
            if size >= len(piece):
                return piece
            self._rest = memoryview(piece)
        part, self._rest = self._rest[:size], self._rest[size:]
        return bytes(part)
