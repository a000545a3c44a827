"""Reading the members of archives: static libraries, packages of Debian, and zip files such as wheels."""

from __future__ import annotations

import contextlib
import io
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from functools import partial

from imagematrix.audit.binaries.window import Window
from imagematrix.common.temp_folder import get_disk_folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from typing import BinaryIO

    from imagematrix.images.oci.byte_stream import ByteStream

AR = b"!<arch>\n"
ZIP = b"PK\x03\x04"
ZIPPED = (".whl", ".zip", ".egg", ".jar")
HEAD = 64  # bytes at the start of a file that identify its format
# Exceptions that reading an untrusted zip can raise.
UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    OSError,
    EOFError,
    ValueError,
    NotImplementedError,
    RuntimeError,
)
MEMBER = 60  # bytes of a member's header in an archive of ar(5)
END = b"`\n"  # the last two bytes of that header
ELF = b"\x7fELF"
MOST = 200_000  # members
IN_MEMORY = 4 << 20  # bytes; larger files are copied to disk
INFLATED = 8 << 30  # bytes; limit for all members of a zip after decompression, also those of zips in it
# Tools that make wheels and jars use no other method. LZMA may take gigabytes of memory.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
PIECE = 1 << 20


@dataclass(slots=True)
class CopyBudget:
    """The number of bytes that may still be copied from zips."""

    remaining: int

    def spend(self, size: int) -> None:
        """Take `size` bytes. Raises ValueError, one of `UNREADABLE`, if that is too much."""
        self.remaining -= size
        if self.remaining < 0:
            raise ValueError("too large")


def list_objects(window: Window) -> Iterator[tuple[str, Window]]:
    """Yield the name and the bytes of each ELF object in a static library, up to the first damaged header."""
    return ((name, part) for name, part in list_members(window) if part.read_at(0, len(ELF)) == ELF)


def list_members(window: Window) -> Iterator[tuple[str, Window]]:
    """Yield the name and the bytes of each member of an archive of ar(5), up to the first damaged header."""
    return ((name, window.get_part(at, size)) for name, at, size in _list_places(window))


def is_whole(window: Window) -> bool:
    """Whether the members of an archive of ar(5) reach its end, and not beyond."""
    end = len(AR)
    for _, at, size in _list_places(window):
        end = at + size
    return window.size in (end, end + end % 2)  # some tools leave the last member's padding out


def _list_places(window: Window) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each member, and where the headers say that it begins, and how long it is."""
    at = len(AR)
    for _ in range(MOST):
        head = window.read_at(at, MEMBER)
        size = head[48:58].strip()
        if head[58:60] != END or not size.isdigit():
            return
        at += MEMBER
        yield head[:16].decode("ascii", "replace").rstrip(" /"), at, int(size)
        at += int(size) + int(size) % 2  # members begin at even offsets (ar(5))


def open_zip(window: Window) -> zipfile.ZipFile:
    """Open a zip for reading; closing it leaves the window open. Raises one of `UNREADABLE`."""
    return zipfile.ZipFile(io.BufferedReader(window.get_part(0, window.size)))


def list_zip_files(
    window: Window,
) -> Iterator[tuple[str, int, Callable[[], AbstractContextManager[ByteStream]]]]:
    """Yield the name and the size of each file in a zip, and a function that opens it.

    Raises one of `UNREADABLE`.
    """
    with open_zip(window) as archive:
        members = archive.infolist()
        if len(members) > MOST or sum(member.file_size for member in members) > INFLATED:
            raise ValueError("too large")
        if unknown := {member.compress_type for member in members}.difference(METHODS):
            raise ValueError(f"members are compressed by method {min(unknown)}")
        for member in members:
            if not member.is_dir() and member.file_size:
                yield member.filename, member.file_size, partial(archive.open, member)


@contextlib.contextmanager
def copy_stream(file: ByteStream, size: int, head: bytes = b"") -> Iterator[Window]:
    """Yield a window on the next `size` bytes of a stream, copied to memory, or to disk if they are many.

    `head` are the first of these bytes, which the caller has already read.
    """
    with contextlib.ExitStack() as stack:
        copy: BinaryIO = io.BytesIO()
        if size > IN_MEMORY:
            copy = stack.enter_context(tempfile.TemporaryFile(dir=get_disk_folder()))
        copy.write(head)
        remaining = size - len(head)
        while remaining > 0 and (piece := file.read(min(PIECE, remaining))):
            copy.write(piece)
            remaining -= len(piece)
        yield Window(copy, 0, size - max(remaining, 0))
