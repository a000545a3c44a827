"""What readers of layers and archives expect of a file: they read it once, from its beginning."""

from __future__ import annotations

from typing import Protocol

__all__ = ["ByteStream"]


class ByteStream(Protocol):
    """A stream of bytes."""

    def read(self, size: int = ..., /) -> bytes:
        """Return the next bytes, empty at the end."""
