"""Decompressed layers of any compression, with a limit for the expansion."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from imagematrix.errors import AuditError
from imagematrix.images.oci.ungzip import ungzip
from imagematrix.images.oci.unzstd import unzstd

if TYPE_CHECKING:
    from imagematrix.images.oci.byte_stream import ByteStream

# Magic bytes of compressed files.
GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
UNSUPPORTED = {b"\xfd7zX": "xz", b"BZh": "bzip2", b"\x04\x22\x4d\x18": "lz4"}
SKIPPABLE = range(0x50, 0x60)  # first bytes of skippable frames of Zstandard
FREE = 16 << 30  # bytes to which any stream may expand; above, RATIO applies
RATIO = 100
PIECE = 1 << 20


class DecompressedStream:
    """The content of a stream, decompressed if it is gzip or Zstandard.

    `read` raises ValueError if it is damaged or expands beyond the limit, EOFError if it is truncated.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._raw = _CountedStream(stream)
        head = self._raw.head
        self._file: ByteStream = self._raw
        if head.startswith(GZIP):
            self._file = ungzip(self._raw)
        elif head == ZSTD or (head[1:] == b"\x2a\x4d\x18" and head[0] in SKIPPABLE):
            self._file = unzstd(self._raw)
        self.produced = 0

    @property
    def unsupported(self) -> str | None:
        """The name of a compression that this looks like and that is not supported."""
        names = (name for magic, name in UNSUPPORTED.items() if self._raw.head.startswith(magic))
        return next(names, None)

    def read(self, size: int = -1, /) -> bytes:
        """Return the next `size` bytes, fewer at the end."""
        data = self._file.read(size)
        self.produced += len(data)
        if self.produced > max(FREE, RATIO * self._raw.read_so_far):
            raise ValueError(f"{self._raw.read_so_far} bytes expand to more than {self.produced}")
        return data


class HashedStream:
    """A stream that hashes the bytes read from it, and compares them with the `expected` digest."""

    def __init__(self, stream: ByteStream, expected: str = "") -> None:
        self._stream = stream
        self._expected = expected
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        """The digest of the bytes read so far."""
        return f"sha256:{self._hash.hexdigest()}"

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes."""
        piece = self._stream.read(size)
        self._hash.update(piece)
        return piece

    def finish(self) -> None:
        """Read to the end; raise AuditError if the digest is not the expected one."""
        while self.read(PIECE):
            pass
        if self.digest != self._expected:
            raise AuditError(f"the content of blob {self._expected} does not match its digest")


class _CountedStream:
    """A stream that counts the bytes read, and replays its first bytes."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self.head = b""
        while len(self.head) < len(ZSTD) and (piece := stream.read(len(ZSTD) - len(self.head))):
            self.head += piece
        self._ahead = self.head
        self.read_so_far = len(self.head)

    def read(self, size: int = -1, /) -> bytes:
        end = len(self._ahead) if size < 0 else size
        ahead, self._ahead = self._ahead[:end], self._ahead[end:]
        data = self._stream.read(size - len(ahead) if size >= 0 else size)
        self.read_so_far += len(data)
        return ahead + data if ahead else data
