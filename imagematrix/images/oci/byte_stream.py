"""What readers of layers and archives expect of a file: they read it once, from its beginning."""

from __future__ import annotations

from typing import Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

PIECE = 1 << 20


class ByteStream(Protocol):
    """A stream of bytes."""

    def read(self, size: int = ..., /) -> bytes:
        """Return the next bytes, empty at the end."""


def read_exactly(read: Callable[[int], bytes], size: int) -> bytes:
    """Return the next `size` bytes, all if it is negative, from a `read` that may return fewer each time."""
    parts: list[bytes] = []
    while size and (piece := read(size if size > 0 else PIECE)):
        parts.append(piece)
        size -= len(piece) if size > 0 else 0
    return b"".join(parts)
