"""The checksums of files in an rpm database, in any of its three formats.

A database has the header of each package: SQLite in a table (rpmdb.sqlite), ndb in slots (Packages.db),
Berkeley DB in the pages of a hash (Packages). rpm's manual describes the headers ("RPM package format"),
lib/backend/ndb/rpmpkg.c the format ndb, and dbinc/db_page.h that of Berkeley DB. A database that is damaged
or too large yields no checksums, so its files are decoded.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import struct
import tempfile
from pathlib import Path

from imagematrix.audit.archives import copied
from imagematrix.scratch import disk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from imagematrix.audit.window import Window
    from imagematrix.oci.expanded import ByteStream

    Headers = Callable[[ByteStream, int], Iterator[bytes]]

__all__ = ["berkeley", "ndb", "sqlite"]

LARGEST = 512 << 20  # bytes of a database; with 2,000 packages it has about 150 MB
LONGEST = 32 << 20  # bytes of a header
STEPS = 10_000_000  # instructions of SQLite's virtual machine; a package takes four

INDEX = struct.Struct(">II")  # number of entries, number of bytes after them
ENTRY = struct.Struct(">IIII")  # tag, type, offset among the bytes, number of values
DIGESTS, ALGORITHM = 1035, 5011  # tags
INT32, STRINGS = 4, 8  # types
ALGORITHMS = {1: "md5", 2: "sha1", 8: "sha256", 9: "sha384", 10: "sha512", 11: "sha224"}  # as in OpenPGP
MD5 = 1  # where no algorithm is named
HEXADECIMAL = re.compile(rb"(?:[0-9a-f]{2})+")

NDB = struct.Struct("<4sIII")  # magic, version, generation, pages with slots
SLOT = struct.Struct("<4sIII")  # magic, number of the package, first block, blocks
BLOB = struct.Struct("<4sIII")  # magic, number of the package, generation, bytes
SLOTS = 32  # offset of the first slot
BLOCK, PAGE = 16, 4096
MOST_SLOTS = 1_000_000

META = struct.Struct("<12xIII")  # magic, version, bytes of a page
HASH = 0x061561
SIZES = frozenset(1 << power for power in range(9, 17))  # bytes of a page
HEAD = struct.Struct("<16xIHHxB")  # next page, entries, bytes in use on an overflow page, type
HASHED = (2, 13)  # types of pages: unsorted and sorted
OVERFLOW = 7
OFFPAGE = struct.Struct("<B3xII")  # type, first page, bytes
ELSEWHERE = 3  # type of an entry on overflow pages, where all headers of packages with files are


def sqlite(file: ByteStream, size: int) -> Iterator[tuple[str, bytes]]:
    """Yield algorithm and checksum of each file in a database of SQLite."""
    return _checksums(_sqlite, file, size)


def ndb(file: ByteStream, size: int) -> Iterator[tuple[str, bytes]]:
    """Yield algorithm and checksum of each file in a database of ndb."""
    return _checksums(_ndb, file, size)


def berkeley(file: ByteStream, size: int) -> Iterator[tuple[str, bytes]]:
    """Yield algorithm and checksum of each file in a database of Berkeley DB."""
    return _checksums(_berkeley, file, size)


def _checksums(headers: Headers, file: ByteStream, size: int) -> Iterator[tuple[str, bytes]]:
    if size > LARGEST:
        return
    left = size
    for header in headers(file, size):
        left -= len(header)
        if left < 0:  # the database repeats headers, which together exceed its size
            return
        yield from _digests(header)


def _digests(header: bytes) -> Iterator[tuple[str, bytes]]:
    if len(header) < INDEX.size:
        return
    entries, length = INDEX.unpack_from(header)
    start = INDEX.size + entries * ENTRY.size
    data = header[start : start + length]
    if len(data) < length:
        return
    fields: Mapping[tuple[int, int], tuple[int, int]] = {
        (tag, kind): (offset, count)
        for tag, kind, offset, count in ENTRY.iter_unpack(header[INDEX.size : start])
    }
    offset, _ = fields.get((ALGORITHM, INT32), (None, 0))
    algorithm = ALGORITHMS.get(MD5 if offset is None else int.from_bytes(data[offset : offset + 4], "big"))
    offset, count = fields.get((DIGESTS, STRINGS), (0, 0))
    if algorithm:
        for text in data[offset:].split(b"\0", count)[:count]:
            if HEXADECIMAL.fullmatch(text):  # folders and links have none
                yield algorithm, bytes.fromhex(text.decode())


def _sqlite(file: ByteStream, _: int) -> Iterator[bytes]:
    import sqlite3

    with tempfile.NamedTemporaryFile(dir=disk()) as copy:
        shutil.copyfileobj(file, copy)
        copy.flush()
        # SQLite reads only this file, without a journal, and writes nothing.
        name = f"{Path(copy.name).as_uri()}?mode=ro&immutable=1"
        with (
            contextlib.suppress(sqlite3.Error, UnicodeDecodeError),  # messages may quote what is there
            contextlib.closing(sqlite3.connect(name, uri=True)) as database,
        ):
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
            database.set_progress_handler(lambda: True, STEPS)  # interrupt a query that does not end
            database.execute("PRAGMA trusted_schema = OFF")
            for (header,) in database.execute("SELECT blob FROM Packages"):
                if isinstance(header, bytes):
                    yield header


def _ndb(file: ByteStream, size: int) -> Iterator[bytes]:
    with copied(file, size) as window:
        head = window.at(0, NDB.size)
        if len(head) < NDB.size or not head.startswith(b"RpmP"):
            return
        _, _, _, pages = NDB.unpack(head)
        end = min(pages * PAGE, SLOTS + MOST_SLOTS * SLOT.size)
        for at in range(SLOTS, end, SLOT.size):
            slot = window.at(at, SLOT.size)
            if len(slot) < SLOT.size:
                return
            magic, package, block, _ = SLOT.unpack(slot)
            if magic == b"Slot" and package:
                yield _blob(window, block * BLOCK)


def _blob(window: Window, at: int) -> bytes:
    head = window.at(at, BLOB.size)
    if len(head) < BLOB.size or not head.startswith(b"BlbS"):
        return b""
    _, _, _, length = BLOB.unpack(head)
    return window.at(at + BLOB.size, min(length, LONGEST))


def _berkeley(file: ByteStream, size: int) -> Iterator[bytes]:
    with copied(file, size) as window:
        meta = window.at(0, META.size)
        magic, _, page = META.unpack(meta) if len(meta) == META.size else (0, 0, 0)
        if magic != HASH or page not in SIZES:
            return
        left = window.size // page
        for index in range(1, window.size // page):
            for first, length in _elsewhere(window.at(index * page, page)):
                parts: list[bytes] = []
                here, wanted = first, min(length, LONGEST)
                while here and wanted > 0 and left > 0:
                    left -= 1  # each page belongs to one entry
                    here, part = _overflow(window.at(here * page, page), wanted)
                    parts.append(part)
                    wanted -= len(part)
                yield b"".join(parts)


def _elsewhere(page: bytes) -> Iterator[tuple[int, int]]:
    """Yield the first page and the length of each value on overflow pages. Keys and values alternate."""
    _, entries, _, kind = HEAD.unpack_from(page)
    if kind in HASHED:
        offsets = struct.unpack_from(f"<{min(entries, (len(page) - HEAD.size) // 2)}H", page, HEAD.size)
        for offset in offsets[1::2]:
            if offset <= len(page) - OFFPAGE.size:
                where, first, length = OFFPAGE.unpack_from(page, offset)
                if where == ELSEWHERE:
                    yield first, length


def _overflow(page: bytes, wanted: int) -> tuple[int, bytes]:
    """Return the next page (0 at the end) and up to `wanted` bytes of an overflow page."""
    if len(page) < HEAD.size:
        return 0, b""
    following, _, used, kind = HEAD.unpack_from(page)
    return (following, page[HEAD.size :][: min(used, wanted)]) if kind == OVERFLOW else (0, b"")
