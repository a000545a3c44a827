"""Reading layers by digest, each only once: by this command, or by an earlier one that cached the result."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import CancelledError, Future, InvalidStateError
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

from imagematrix.audit.binaries.cpu.scan import scan_later
from imagematrix.audit.images import layer
from imagematrix.common.single_flight import SingleFlight
from imagematrix.images.oci import deflate
from imagematrix.images.oci.decompression import DecompressedStream, HashedStream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from imagematrix.audit.binaries.cpu.scan import StartScan
    from imagematrix.audit.images.layer import Layer
    from imagematrix.images.oci.byte_stream import ByteStream

    OpenLayer = Callable[[str], AbstractContextManager[ByteStream]]

MOST = 4  # layers at a time: each takes memory


class LayerCache(Protocol):
    """A cache that keeps layers from one command to the next."""

    def get(self, digest: str) -> Layer | None:
        """Return the layer with a digest, or None if it is not cached."""

    def put(self, layer: Layer) -> None:
        """Cache a layer. The caller has checked that its bytes match its digest."""


class Layers:
    """The layers read so far. Threads may share it.

    `on_read` is called with the number of bytes of each read, never by two threads at once. `start_scan`
    starts to scan a file; see `StartScan`.
    """

    def __init__(
        self,
        cache: LayerCache | None = None,
        on_read: Callable[[int], None] = lambda _: None,
        start_scan: StartScan = scan_later,
    ) -> None:
        self._cache = cache
        self._on_read = on_read
        self._start_scan = start_scan
        self._counting = threading.Lock()
        self._once: SingleFlight[str, Layer] = SingleFlight()
        self._awaited: set[Future[Layer]] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def read_layer(self, digest: str, open_layer: OpenLayer) -> Layer:
        """Return the layer with a digest; `open_layer` opens its bytes. Raises AuditError."""
        return self._once(digest, partial(self._read_through_cache, digest, open_layer))

    def read_layers(self, digests: Sequence[str], open_layer: OpenLayer) -> tuple[Layer, ...]:
        """Return layers, reading several at a time; raise AuditError, or CancelledError after `stop`."""
        finished = threading.Event()
        results: dict[str, Future[Layer]] = {digest: Future() for digest in digests}
        waiting: SimpleQueue[str] = SimpleQueue()
        for digest in results:
            waiting.put(digest)

        def work() -> None:
            with contextlib.suppress(Empty, InvalidStateError):  # the latter of a result that was cancelled
                while not finished.is_set():
                    digest = waiting.get_nowait()
                    try:
                        result = self.read_layer(digest, open_layer)
                    except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                        results[digest].set_exception(error)
                    else:
                        results[digest].set_result(result)

        with self._lock:
            if self._stopped:
                raise CancelledError
            self._awaited.update(results.values())
        for _ in range(min(MOST, len(results), deflate.count_threads())):
            # Daemon threads: a command that is interrupted does not wait for a large file.
            threading.Thread(target=work, name="layer", daemon=True).start()
        try:
            return tuple(results[digest].result() for digest in digests)
        finally:
            finished.set()
            with self._lock:
                self._awaited.difference_update(results.values())

    def stop(self) -> None:
        """Make `read_layers` raise CancelledError in all threads, now and later."""
        with self._lock:
            self._stopped = True
            for result in self._awaited:
                result.cancel()

    def read_unnamed_layer(self, stream: ByteStream, name: str) -> Layer:
        """Return a layer whose digest is not known; it gets the digest of its tar. Raises AuditError."""
        tar = HashedStream(DecompressedStream(_WatchedStream(stream, self._count)))
        return layer.rename_layer(layer.read_layer(tar, name, self._start_scan), tar.digest)

    def _read_through_cache(self, digest: str, open_layer: OpenLayer) -> Layer:
        if self._cache and (cached := self._cache.get(digest)):
            return cached
        with open_layer(digest) as stream:
            hashed = HashedStream(_WatchedStream(stream, self._count), digest)
            result = layer.read_layer(hashed, digest, self._start_scan)
            hashed.finish()
        if self._cache:
            self._cache.put(result)
        return result

    def _count(self, size: int) -> None:
        with self._counting:
            self._on_read(size)


class _WatchedStream:
    def __init__(self, stream: ByteStream, on_read: Callable[[int], None]) -> None:
        self._stream = stream
        self._on_read = on_read

    def read(self, size: int = -1, /) -> bytes:
        piece = self._stream.read(size)
        self._on_read(len(piece))
        return piece
