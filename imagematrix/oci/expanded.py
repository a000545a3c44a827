"""Decompressed layers of any compression, with a limit for the expansion."""

from __future__ import annotations

import gzip
import zlib
from typing import Protocol

__all__ = ["GZIP", "ZSTD", "Expanded", "Stream"]

# Magic bytes of compressed files.
GZIP = b"\x1f\x8b"
ZSTD = b"\x28\xb5\x2f\xfd"
UNSUPPORTED = {b"\xfd7zX": "xz", b"BZh": "bzip2", b"\x04\x22\x4d\x18": "lz4"}
SKIPPABLE = range(0x50, 0x60)  # first bytes of skippable frames of Zstandard
WINDOW = 128 << 20  # the largest window of a Zstandard stream, in bytes
FREE = 16 << 30  # bytes to which any stream may expand; above, RATIO applies
RATIO = 100
PIECE = 1 << 20


class Stream(Protocol):
    """A stream of bytes."""

    def read(self, size: int = ..., /) -> bytes:
        """Return the next bytes, empty at the end."""


class Expanded:
    """The content of a stream, decompressed if it is gzip or Zstandard.

    `read` raises ValueError if it is damaged or expands beyond the limit, EOFError if it is truncated.
    """

    def __init__(self, stream: Stream) -> None:
        self._raw = _Counted(stream)
        self._file = _opened(self._raw)
        self.produced = 0

    @property
    def unsupported(self) -> str | None:
        """The name of a compression that this looks like and that is not supported."""
        names = (name for magic, name in UNSUPPORTED.items() if self._raw.head.startswith(magic))
        return next(names, None)

    def read(self, size: int = -1, /) -> bytes:
        """Return the next `size` bytes, fewer at the end."""
        try:
            data = self._file.read(size)
        except (OSError, zlib.error) as error:
            if type(error) not in (gzip.BadGzipFile, zlib.error):
                raise
            raise ValueError(str(error)) from error
        self.produced += len(data)
        if self.produced > max(FREE, RATIO * self._raw.read_so_far):
            raise ValueError(f"{self._raw.read_so_far} bytes expand to more than {self.produced}")
        return data


class _Counted:
    """A stream that counts the bytes read, and replays its first bytes."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.head = b""
        while len(self.head) < len(ZSTD) and (piece := stream.read(len(ZSTD) - len(self.head))):
            self.head += piece
        self._ahead = self.head
        self.read_so_far = len(self.head)

    def read(self, size: int = -1, /) -> bytes:
        if self._ahead:
            end = len(self._ahead) if size < 0 else size
            data, self._ahead = self._ahead[:end], self._ahead[end:]
            return data
        data = self._stream.read(size)
        self.read_so_far += len(data)
        return data


class _Zstandard:
    """A stream of Zstandard frames with uniform errors."""

    def __init__(self, raw: _Counted) -> None:
        import zstandard

        self._error = zstandard.ZstdError
        decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW)
        self._reader = decompressor.stream_reader(raw, read_across_frames=True)  # type: ignore[arg-type]

    def read(self, size: int = PIECE, /) -> bytes:
        parts: list[bytes] = []
        try:
            while size > 0 and (piece := self._reader.read(size)):
                parts.append(piece)
                size -= len(piece)
        except self._error as error:
            raise ValueError(str(error)) from error
        return b"".join(parts)


def _opened(raw: _Counted) -> Stream:
    if raw.head.startswith(GZIP):
        return gzip.GzipFile(fileobj=raw)  # type: ignore[call-overload,no-any-return]  # read only
    if raw.head == ZSTD or (raw.head[1:] == b"\x2a\x4d\x18" and raw.head[0] in SKIPPABLE):
        return _Zstandard(raw)
    return raw
