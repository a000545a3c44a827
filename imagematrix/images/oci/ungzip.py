"""Decompressing streams of gzip, by what there is: the library isal, or Python's zlib.

isal takes 0.4 times zlib's time. It is a dependency of the package. The one-file program (`make zipapp`) has
no compiled libraries.
"""

from __future__ import annotations

import zlib

from imagematrix.images.oci.byte_stream import read_exactly

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from imagematrix.images.oci.byte_stream import ByteStream

PIECE = 1 << 16  # bytes of the stream to decompress at once; more are copied more often
GZIP_ONLY = 16 + zlib.MAX_WBITS  # as zlib.decompressobj() wants it: with gzip's header and checksum


def ungzip(raw: ByteStream) -> ByteStream:
    """Return the content of a stream of one or more members (RFC 1952), with zeros allowed behind each.

    Its `read` raises ValueError if the stream is damaged, EOFError if it is truncated, and what `raw` raises.
    """
    try:
        from isal import isal_zlib
    except ModuleNotFoundError:
        return _Members(raw, zlib)
    return _Members(raw, isal_zlib)


class _Members:
    """A stream decompressed by `library`: zlib, or one with the same functions."""

    def __init__(self, raw: ByteStream, library: Any) -> None:
        self._raw = raw
        self._library = library
        self._member: Any = library.decompressobj(GZIP_ONLY)
        self._ahead = b""  # bytes that were read but not decompressed

    def read(self, size: int = -1, /) -> bytes:
        return read_exactly(self._read_next, size)

    def _read_next(self, size: int) -> bytes:
        while True:
            if self._member.eof and not self._begin_member():
                return b""
            self._ahead = self._ahead or self._raw.read(PIECE)
            try:
                data: bytes = self._member.decompress(self._ahead, size)
            except self._library.error as error:
                raise ValueError(str(error)) from error
            ended = not self._ahead and not data
            self._ahead = self._member.unconsumed_tail
            if data:
                return data
            if ended and not self._member.eof:
                raise EOFError("the stream ends before its end is marked")

    def _begin_member(self) -> bool:
        """Whether another member follows the one that has ended; if so, begin with it."""
        ahead = self._member.unused_data.lstrip(b"\0")
        while not ahead and (piece := self._raw.read(PIECE)):
            ahead = piece.lstrip(b"\0")
        if ahead:
            self._ahead = ahead
            self._member = self._library.decompressobj(GZIP_ONLY)
        return bool(ahead)
