"""Reading tars as container engines read them, from the beginning to the end."""

from __future__ import annotations

import math
import re
import tarfile
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from imagematrix.images.oci.byte_stream import ByteStream

PIECE = 1 << 20  # bytes to read at once
LONGEST = 1 << 20  # bytes of an extended header; names have at most 4096
MOST_HEADERS = 2 << 20  # bytes of a header with the map of a sparse file, which takes five times the memory
LARGEST = (1 << 63) - 1  # bytes of a member; engines keep its size in 64 bits
# Types of extended headers, which describe the next member and are read in one piece.
EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
# The extended headers that a member may have: global ones, then a PAX header and GNU long names, each at most
# once. If a PAX header with names comes before a GNU long name, tarfile uses it and engines do not.
ORDERLY = re.compile(rb"g{0,9}(?!.*(.).*\1)[LKx]*")
NAMES = frozenset({"path", "linkpath"})
# Only a POSIX header has a prefix of the name in this place; a GNU header has times there, in octal digits.
MAGIC, USTAR = 257, b"ustar\0"
PREFIX, TIMES = slice(345, 500), re.compile(rb"[0-7 ]+")


class _StrictTar(tarfile.TarFile):
    """A tar that records the types of the extended headers of the current member, and where its data end.

    Engines take a tar that ends with the data of its last member, as umoci writes it, but not within them.
    """

    extended = b""
    whole = True  # the member and all its extended headers were read
    fileobj: _ForwardFile  # type: ignore[assignment]
    data_end = 0

    def next(self) -> tarfile.TarInfo | None:
        """Return the next member, None at the end; raise tarfile.ReadError if the data before it are cut."""
        member = super().next()
        self.members: list[tarfile.TarInfo] = []  # it keeps them all, which only links need
        if member is None:
            if self.data_end > self.fileobj.size:
                raise tarfile.ReadError("unexpected end of data")
        else:
            has_data = member.isreg() and not member.issparse()
            self.data_end = member.offset_data + member.size if has_data else self.offset
        return member


class _Member(tarfile.TarInfo):
    """A member that tarfile and container engines, which use Go's archive/tar, read in the same way.

    Headers that they would read differently raise an error, as do invalid headers, which tarfile would take
    for the end of the archive, and values in them that no file can have.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        return super().frombuf(buf, encoding, errors).without_prefix(buf)

    @classmethod
    def _frombuf(cls, buf: bytes, encoding: str, errors: str, *, dircheck: bool = True) -> _Member:
        # Newer releases of tarfile, and Debian 12's, call this in place of frombuf.
        member: _Member = super()._frombuf(buf, encoding, errors, dircheck=dircheck)  # type: ignore[misc]
        return member.without_prefix(buf)

    def without_prefix(self, buf: bytes | bytearray) -> Self:
        """Remove the prefix of the name that tarfile reads and engines do not."""
        prefix = bytes(buf[PREFIX]).partition(b"\0")[0]
        if prefix and not buf.startswith(USTAR, MAGIC) and self.type not in tarfile.GNU_TYPES:
            if not TIMES.fullmatch(prefix):
                raise tarfile.InvalidHeaderError("a name prefix in a non-POSIX header")  # type: ignore[attr-defined]
            self.name = self.name.removeprefix(f"{prefix.decode()}/")
        return self

    @classmethod
    def fromtarfile(cls, archive: _StrictTar) -> _Member:  # type: ignore[override]  # our own tars
        try:
            with archive.fileobj.limit_to(MOST_HEADERS):
                return super().fromtarfile(archive)
        except (tarfile.EmptyHeaderError, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(str(error)) from error

    def _proc_member(self, archive: _StrictTar) -> tarfile.TarInfo:
        """Check a header before tarfile reads its data. This is tarfile's hook for subclasses."""
        if self.size < 0 or (self.type in EXTENDED and self.size > LONGEST):
            raise tarfile.ReadError(f"invalid size of a header: {self.size} bytes")
        # tarfile applies sizes from global headers, which engines ignore. If a member has several headers of
        # another type, tarfile uses the first, engines use the last.
        archive.pax_headers = {}
        before = b"" if archive.whole else archive.extended
        archive.extended = before + (self.type if self.type in EXTENDED else b"")
        archive.whole = self.type not in EXTENDED
        orderly = ORDERLY.fullmatch(archive.extended)
        member: tarfile.TarInfo = super()._proc_member(archive) if orderly else self  # type: ignore[misc]
        _, named, after = archive.extended.partition(tarfile.XHDTYPE)
        if not orderly or (named and after and NAMES & member.pax_headers.keys()):
            raise tarfile.ReadError(f"extended headers {archive.extended.decode()} for one file")
        _require_possible(member)
        return member


class _ForwardFile:
    """A stream as tarfile reads a file, but only forward; the last block is filled with zeros.

    tarfile's own class for streams copies all bytes several times. The end may be read once: tarfile skips a
    member by its size, whatever there is. `size` is the number of bytes that came so far, without the zeros.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._ended = self._filled = False
        self._position = 0
        self._ahead = memoryview(b"")
        self._limit: int | None = None
        self.size = 0

    @contextmanager
    def limit_to(self, size: int) -> Iterator[None]:
        """Let no more than `size` bytes be read in this context, nor in one around it by its own limit."""
        before, self._limit = self._limit, self._position + size
        try:
            yield
        finally:
            self._limit = before

    def tell(self) -> int:
        """Return how far it was read."""
        return self._position

    def seek(self, position: int) -> None:
        """Skip what is before a position; raise tarfile.StreamError if it was passed already."""
        if position < self._position:
            raise tarfile.StreamError("seeking backwards is not allowed")
        while self._position < position:
            self.read(min(position - self._position, PIECE))

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer at the end; raise tarfile.ReadError after it."""
        if self._limit is not None and self._position + size > self._limit:
            raise tarfile.ReadError("a header is too long")
        part, self._ahead = bytes(self._ahead[:size]), self._ahead[size:]
        if len(part) < size:
            part = self._read_more(part, size)
        self._position += len(part)
        return part

    def _read_more(self, part: bytes, size: int) -> bytes:
        parts = [part]
        missing = size - len(part)
        while missing and (piece := self._receive()):
            parts.append(piece[:missing])
            self._ahead = memoryview(piece)[missing:]
            missing -= len(parts[-1])
        if missing == size:
            if self._ended:
                raise tarfile.ReadError("unexpected end of data")
            self._ended = True
        return b"".join(parts)

    def _receive(self) -> bytes:
        piece = b"" if self._filled else self._stream.read(PIECE)
        self.size += len(piece)
        if not piece and not self._filled:
            self._filled = True
            piece = bytes(-self.size % tarfile.BLOCKSIZE)
        return piece


def open_tar(stream: ByteStream) -> tarfile.TarFile:
    """Open a stream as a tar whose members are read in order; reading it raises tarfile.TarError."""
    return _StrictTar(fileobj=_ForwardFile(stream), tarinfo=_Member)  # type: ignore[arg-type]  # it only reads


def _require_possible(member: tarfile.TarInfo) -> None:
    """Raise tarfile.ReadError for values of an extended header that no file can have; engines refuse them."""
    if not 0 <= member.size <= LARGEST:
        raise tarfile.ReadError("invalid size of a file in an extended header")
    if not math.isfinite(member.mtime):
        raise tarfile.ReadError(f"invalid time of a file: {member.mtime}")
    if "\0" in member.name or "\0" in member.linkname:
        raise tarfile.ReadError(f"the name {member.name[:200]!r} has a NUL character")
