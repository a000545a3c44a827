"""Edits that remove bytes from a file without changing its length or the offsets of its other parts."""

from __future__ import annotations

from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.audit.binaries.window import Window

PIECE = 1 << 20
ZEROS = bytes(PIECE)


@dataclass(frozen=True, slots=True)
class Edit:
    """The replacement for the bytes from `start` to `end`: `head`, then the ranges `kept`, then zeros.

    The ranges are offsets and sizes in the original file, in order, between `start` and `end`.
    """

    start: int
    end: int
    head: bytes
    kept: tuple[tuple[int, int], ...]

    @property
    def removed_size(self) -> int:
        """The number of zeros at the end."""
        return self.end - self.start - len(self.head) - sum(size for _, size in self.kept)


def apply_edits(window: Window, edits: Iterable[Edit]) -> Iterator[bytes | int]:
    """Yield the bytes of a file after edits that do not overlap; a number n stands for n zeros."""
    at = 0
    for edit in sorted(edits, key=lambda edit: edit.start):
        yield from _read_pieces(window, at, edit.start - at)
        yield edit.head
        for offset, size in edit.kept:
            yield from _read_pieces(window, offset, size)
        yield edit.removed_size
        at = edit.end
    yield from _read_pieces(window, at, window.size - at)


def read_removed_bytes(window: Window, edits: Iterable[Edit]) -> Iterator[bytes]:
    """Yield the bytes that the edits remove."""
    for edit in edits:
        at = edit.start + len(edit.head)
        for offset, size in (*edit.kept, (edit.end, 0)):
            yield from _read_pieces(window, at, offset - at)
            at = offset + size


def generate_zeros(count: int) -> Iterator[bytes]:
    """Yield `count` zeros in pieces."""
    for at in range(0, count, PIECE):
        yield ZEROS[: count - at]


def _read_pieces(window: Window, offset: int, size: int) -> Iterator[bytes]:
    """Yield a range of a file; raise OSError if the file has become shorter."""
    for at in range(offset, offset + size, PIECE):
        piece = window.read_at(at, min(PIECE, offset + size - at))
        if not piece:
            raise OSError(None, "the file has become shorter")
        yield piece
