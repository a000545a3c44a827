"""Random access to a part of a file, never beyond the part's end."""

from __future__ import annotations

import io

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO, Self

    from _typeshed import WriteableBuffer

PIECE = 1 << 20  # bytes that are searched at once


class Window(io.RawIOBase):
    """The `size` bytes of a seekable file from `start` on, as a file of its own.

    Offsets and sizes from untrusted files are safe: a read beyond the end returns fewer bytes. `start` is the
    window's offset in the file.
    """

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file = file
        self.start = start
        self.size = size
        self._at = 0

    def readable(self) -> bool:  # noqa: D102 - as of every file
        return True

    def seekable(self) -> bool:  # noqa: D102 - as of every file
        return True

    def tell(self) -> int:  # noqa: D102 - as of every file
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:  # noqa: D102 - as of every file
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: WriteableBuffer, /) -> int:  # noqa: D102 - as of every file
        view = memoryview(buffer)
        piece = self.read_at(self._at, len(view))
        view[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def fileno(self) -> int:
        """Return the descriptor of the whole file."""
        return self._file.fileno()

    def read_at(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset` on."""
        size = min(size, self.size - offset)
        if offset < 0 or size <= 0:
            return b""
        self._file.seek(self.start + offset)
        return self._file.read(size)

    def list_pieces(self, most: int, overlap: int) -> Iterator[bytes]:
        """Yield the first `most` bytes piece by piece, each with the first `overlap` bytes of the next."""
        for offset in range(0, min(self.size, most), PIECE):
            yield self.read_at(offset, PIECE + overlap)

    def get_part(self, offset: int, size: int) -> Self:
        """Return the window of up to `size` bytes from `offset` on."""
        offset = min(max(offset, 0), self.size)
        return type(self)(self._file, self.start + offset, max(0, min(size, self.size - offset)))
