"""A layer that is read from a registry while it arrives, and kept so that a later command goes on from there.

What is in the file was received by this command or an earlier one that was killed at any moment, so all of it
is hashed each time that a command first reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tarfile
import threading

from imagematrix.errors import AuditError
from imagematrix.images.oci.byte_stream import PIECE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import IO

    from imagematrix.images.oci.byte_stream import ByteStream
    from imagematrix.images.oci.registry import Registry

# What readers of a layer raise for its content; all else, such as a full disk, says nothing of it.
DAMAGE = (tarfile.TarError, EOFError, ValueError, AuditError)


class LayerDownload:
    """The layer `digest` of `size` bytes in a registry's repository, kept in the file `path`. Thread-safe.

    `on_bytes` is told the bytes that are received, `on_layer` is called when the layer is complete.
    """

    def __init__(
        self,
        registry: Registry,
        digest: str,
        size: int,
        path: Path,
        on_bytes: Callable[[int], object],
        on_layer: Callable[[], object],
    ) -> None:
        self._registry = registry
        self._digest = digest
        self._size = size
        self._path = path
        self._on_bytes = on_bytes
        self._on_layer = on_layer
        self._lock = threading.Lock()
        self._complete = False
        self._refusal: AuditError | None = None

    def count_missing_bytes(self) -> int:
        """Return how many bytes are to be received."""
        return self._size - min(self._path.stat().st_size, self._size) if self._path.exists() else self._size

    @contextlib.contextmanager
    def open(self) -> Iterator[ByteStream]:
        """Yield the bytes of the layer, of which the missing ones are received as they are read.

        At the end of the first context, the layer has its size and its digest. If not, AuditError is raised
        in place of what the reader says, and the file is removed. Raises what `Registry.open` does, and
        OSError.
        """
        with self._lock:  # an image may have a layer twice
            if self._refusal:
                raise self._refusal
            if not self._complete:
                with self._receive() as stream:
                    yield stream
                self._complete = True
                self._on_layer()
                return
        with self._path.open("rb") as file:
            yield file

    @contextlib.contextmanager
    def _receive(self) -> Iterator[ByteStream]:
        with contextlib.ExitStack() as closing:
            file = closing.enter_context(open_download(self._path, "a+b"))
            file.seek(0)
            stream = _ArrivingStream(
                file,
                self._size,
                lambda start: closing.enter_context(self._registry.open(self._digest, start)),
                self._on_bytes,
            )
            try:
                yield stream
            except DAMAGE:
                self._require_intact(stream)
                raise
            self._require_intact(stream)

    def _require_intact(self, stream: _ArrivingStream) -> None:
        """Read to the end; remove the file and raise AuditError if it is not what the manifest names."""
        while stream.read(PIECE):
            pass
        if stream.digest != self._digest:
            self._refusal = AuditError(
                f"the content of blob {self._digest} does not match its digest",
                remedy="run this again; if it stays so, the registry's storage or a proxy is damaged",
            )
        elif stream.received != self._size:
            self._refusal = AuditError(
                f"blob {self._digest} has {stream.received} bytes, and its manifest says {self._size}",
                remedy="build and push the image again, with a tool that writes its manifest as it is",
            )
        if self._refusal:
            self._path.unlink()
            raise self._refusal


def open_download(path: Path, mode: str) -> IO[bytes]:
    """Open a file of a download, but nothing that it is a link to; raise OSError.

    In a store that a group fills, others may have put a link there.
    """
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))


class _ArrivingStream:
    """The content of `file`, then what `open_at` yields from its end on, which is appended, up to `size`."""

    def __init__(
        self,
        file: IO[bytes],
        size: int,
        open_at: Callable[[int], ByteStream],
        on_bytes: Callable[[int], object],
    ) -> None:
        self._file = file
        self._size = size
        self._open_at = open_at
        self._on_bytes = on_bytes
        self._hash = hashlib.sha256()
        self._source: ByteStream | None = None
        self.received = 0

    @property
    def digest(self) -> str:
        """The digest of what was read."""
        return f"sha256:{self._hash.hexdigest()}"

    def read(self, size: int = PIECE, /) -> bytes:
        wanted = min(size if size >= 0 else PIECE, PIECE, self._size - self.received)
        piece = self._file.read(wanted) if self._source is None else b""
        if not piece and wanted:
            piece = self._receive(wanted)
        self.received += len(piece)
        self._hash.update(piece)
        return piece

    def _receive(self, size: int) -> bytes:
        if self._source is None:
            self._source = self._open_at(self.received)
        piece = self._source.read(size)
        self._file.write(piece)
        self._on_bytes(len(piece))
        return piece
