"""Edits of a file that leave its length and all offsets as they are, and the bytes of the file with them."""

from __future__ import annotations

from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.audit.window import Window

__all__ = ["Edit", "edited", "taken_out", "zeros"]

PIECE = 1 << 20
ZEROS = bytes(PIECE)


@dataclass(frozen=True, slots=True)
class Edit:
    """What comes in place of the bytes from `start` to `end`: `head`, then ranges of these bytes, then zeros.

    The ranges are offsets and sizes in the file as it was, in order.
    """

    start: int
    end: int
    head: bytes
    kept: tuple[tuple[int, int], ...]

    @property
    def removed(self) -> int:
        """The number of zeros at the end."""
        return self.end - self.start - len(self.head) - sum(size for _, size in self.kept)


def edited(window: Window, edits: Iterable[Edit]) -> Iterator[bytes | int]:
    """Yield the bytes of a file with the edits, which do not overlap; a number stands for so many zeros."""
    at = 0
    for edit in sorted(edits, key=lambda edit: edit.start):
        yield from _pieces(window, at, edit.start - at)
        yield edit.head
        for offset, size in edit.kept:
            yield from _pieces(window, offset, size)
        yield edit.removed
        at = edit.end
    yield from _pieces(window, at, window.size - at)


def taken_out(window: Window, edits: Iterable[Edit]) -> Iterator[bytes]:
    """Yield the bytes that the edits take out."""
    for edit in edits:
        at = edit.start + len(edit.head)
        for offset, size in (*edit.kept, (edit.end, 0)):
            yield from _pieces(window, at, offset - at)
            at = offset + size


def zeros(number: int) -> Iterator[bytes]:
    """Yield so many zeros."""
    for at in range(0, number, PIECE):
        yield ZEROS[: number - at]


def _pieces(window: Window, offset: int, size: int) -> Iterator[bytes]:
    """Yield a range of a file; raise OSError where the file has become shorter."""
    for at in range(offset, offset + size, PIECE):
        piece = window.at(at, min(PIECE, offset + size - at))
        if not piece:
            raise OSError(None, "the file has become shorter")
        yield piece
