"""Reading layers by digest, each only once: by this command, or by an earlier one that cached the result."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

from imagematrix.audit import layer
from imagematrix.errors import AuditError
from imagematrix.oci.expanded import Expanded, Hashed
from imagematrix.once import Once

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from imagematrix.audit.layer import Layer
    from imagematrix.oci.expanded import ByteStream

    Open = Callable[[str], AbstractContextManager[ByteStream]]

__all__ = ["Kept", "Layers"]

MOST = 4  # layers at a time: each takes memory


class Kept(Protocol):
    """A cache that keeps layers from one command to the next."""

    def get(self, digest: str) -> Layer | None:
        """Return the layer with a digest, or None if it is not cached."""

    def put(self, layer: Layer) -> None:
        """Cache a layer. The caller has checked that its bytes match its digest."""


class Layers:
    """The layers read so far. Threads may share it.

    `watch` is called with the number of bytes of each read, never by two threads at once.
    """

    def __init__(self, kept: Kept | None = None, watch: Callable[[int], None] = lambda _: None) -> None:
        self._kept = kept
        self._watch = watch
        self._counting = threading.Lock()
        self._once: Once[str, Layer] = Once()

    def read(self, digest: str, opened: Open) -> Layer:
        """Return the layer with a digest; `opened` opens its bytes. Raises AuditError."""
        return self._once(digest, partial(self._cached_or_read, digest, opened, threading.Event()))

    def all(self, digests: Sequence[str], opened: Open) -> tuple[Layer, ...]:
        """Return layers, reading several at a time; raise AuditError."""
        stopped = threading.Event()
        results: dict[str, Future[Layer]] = {digest: Future() for digest in digests}
        waiting: SimpleQueue[str] = SimpleQueue()
        for digest in results:
            waiting.put(digest)

        def work() -> None:
            with contextlib.suppress(Empty):
                while not stopped.is_set():
                    digest = waiting.get_nowait()
                    try:
                        results[digest].set_result(
                            self._once(digest, partial(self._cached_or_read, digest, opened, stopped))
                        )
                    except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                        results[digest].set_exception(error)

        for _ in range(min(MOST, len(results), len(os.sched_getaffinity(0)))):
            # Daemon threads: a command that is interrupted does not wait for a large file.
            threading.Thread(target=work, name="layer", daemon=True).start()
        try:
            return tuple(results[digest].result() for digest in digests)
        finally:
            stopped.set()

    def unnamed(self, stream: ByteStream, name: str) -> Layer:
        """Return a layer whose digest is not known; it gets the digest of its tar. Raises AuditError."""
        tar = Hashed(Expanded(_Watched(stream, self._count, threading.Event())))
        return layer.renamed(layer.read(tar, name), tar.digest)

    def _cached_or_read(self, digest: str, opened: Open, stopped: threading.Event) -> Layer:
        if self._kept and (kept := self._kept.get(digest)):
            return kept
        with opened(digest) as stream:
            hashed = Hashed(_Watched(stream, self._count, stopped), digest)
            read = layer.read(hashed, digest)
            hashed.finish()
        if self._kept:
            self._kept.put(read)
        return read

    def _count(self, size: int) -> None:
        with self._counting:
            self._watch(size)


class _Watched:
    def __init__(self, stream: ByteStream, watch: Callable[[int], None], stopped: threading.Event) -> None:
        self._stream = stream
        self._watch = watch
        self._stopped = stopped

    def read(self, size: int = -1, /) -> bytes:
        if self._stopped.is_set():
            raise AuditError("another layer cannot be read")
        piece = self._stream.read(size)
        self._watch(len(piece))
        return piece
