"""The packages in an rpm database, in any of its three formats, with the checksums of their files.

A database has the header of each package: SQLite in a table (rpmdb.sqlite), ndb in slots (Packages.db),
Berkeley DB in the pages of a hash (Packages). rpm's manual describes the headers ("RPM package format"),
lib/backend/ndb/rpmpkg.c the format ndb, and dbinc/db_page.h that of Berkeley DB. A database that is damaged
or too large yields no checksums, so its files are decoded, and None for what could not be read.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import struct
import tempfile
from pathlib import Path

from imagematrix.audit.binaries.archives import copy_stream
from imagematrix.audit.packages.installed_package import RPM, InstalledPackage, make_package
from imagematrix.common.temp_folder import get_disk_folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from imagematrix.images.oci.byte_stream import ByteStream

    Headers = Callable[[ByteStream, int], Iterator[bytes]]
    Entry = InstalledPackage | tuple[str, bytes] | None  # a package, a checksum with its algorithm, or damage

LARGEST = 512 << 20  # bytes of a database; with 2,000 packages it has about 150 MB
LONGEST = 32 << 20  # bytes of a header
STEPS = 10_000_000  # instructions of SQLite's virtual machine; a package takes four
MOST_HEADERS = 50_000
MOST_TEXTS = 1_000_000  # checksums and empty texts for folders; with 2,000 packages it has some 300,000
MOST_ENTRIES = 0xFFFF  # in the index of a header, as in rpm itself

INDEX = struct.Struct(">II")  # number of entries, number of bytes after them
ENTRY = struct.Struct(">IIII")  # tag, type, offset among the bytes, number of values
NAME, VERSION, RELEASE, EPOCH, LICENSE, ARCH, SOURCE = 1000, 1001, 1002, 1003, 1014, 1022, 1044  # tags
DIGESTS, ALGORITHM = 1035, 5011
INT32, STRING, STRINGS = 4, 6, 8  # types
LONGEST_TEXT = 1000  # bytes
KEY = "gpg-pubkey"  # the name of the entries for keys, which are no packages
SOURCE_FILE = re.compile(r"(.+)-([^-]+-[^-]+)\.(?:no)?src\.rpm")  # name, version and release
ALGORITHMS = {1: "md5", 2: "sha1", 8: "sha256", 9: "sha384", 10: "sha512", 11: "sha224"}  # as in OpenPGP
MD5 = 1  # where no algorithm is named
HEXADECIMAL = re.compile(rb"(?:[0-9a-f]{2}){1,64}")

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


def read_sqlite(file: ByteStream, size: int) -> Iterator[Entry]:
    """Yield the packages in a database of SQLite, and algorithm and checksum of each of their files."""
    return _read_database(_read_sqlite_headers, file, size)


def read_ndb(file: ByteStream, size: int) -> Iterator[Entry]:
    """Yield the packages in a database of ndb, and algorithm and checksum of each of their files."""
    return _read_database(_read_ndb_headers, file, size)


def read_berkeley(file: ByteStream, size: int) -> Iterator[Entry]:
    """Yield the packages in a database of Berkeley DB, and algorithm and checksum of each of their files."""
    return _read_database(_read_berkeley_headers, file, size)


def _read_database(headers: Headers, file: ByteStream, size: int) -> Iterator[Entry]:
    if size > LARGEST:
        yield None
        return
    remaining = size
    texts = iter(range(MOST_TEXTS))
    for number, header in enumerate(headers(file, size)):
        remaining -= len(header)
        # A database may repeat headers, which together exceed its size, or have any number of empty ones.
        if remaining < 0 or number >= MOST_HEADERS:
            yield None
            return
        fields = _RpmHeader(header)
        if fields.get_text(NAME) != KEY:
            yield _make_rpm_package(fields)
            yield from _list_checksums(fields, texts)


class _RpmHeader:
    """The fields of a package's header; none if it is damaged."""

    def __init__(self, header: bytes) -> None:
        self._fields: Mapping[tuple[int, int], tuple[int, int]] = {}
        self._data = b""
        if len(header) < INDEX.size:
            return
        entries, length = INDEX.unpack_from(header)
        if entries > MOST_ENTRIES:
            return
        start = INDEX.size + entries * ENTRY.size
        data = header[start : start + length]
        if len(data) == length and start <= len(header):
            self._data = data
            self._fields = {
                (tag, kind): (offset, count)
                for tag, kind, offset, count in ENTRY.iter_unpack(header[INDEX.size : start])
            }

    def get_number(self, tag: int) -> int | None:
        """Return a number, or None."""
        offset, _ = self._fields.get((tag, INT32), (None, 0))
        return None if offset is None else int.from_bytes(self._data[offset : offset + 4], "big")

    def get_text(self, tag: int) -> str | None:
        """Return a text, or None."""
        offset, _ = self._fields.get((tag, STRING), (None, 0))
        if offset is None:
            return None
        return self._data[offset : offset + LONGEST_TEXT].partition(b"\0")[0].decode("utf-8", "replace")

    def list_texts(self, tag: int) -> Iterator[bytes]:
        """Yield the texts of a list, which may be millions."""
        start, count = self._fields.get((tag, STRINGS), (0, 0))
        for _ in range(count):
            end = self._data.find(b"\0", start)
            if end < 0:
                yield self._data[start:]
                return
            yield self._data[start:end]
            start = end + 1


def _make_rpm_package(fields: _RpmHeader) -> InstalledPackage | None:
    version, release, epoch = fields.get_text(VERSION), fields.get_text(RELEASE), fields.get_number(EPOCH)
    full_version = f"{version}-{release}" if version and release else version
    source = SOURCE_FILE.fullmatch(fields.get_text(SOURCE) or "")
    return make_package(
        RPM,
        fields.get_text(NAME),
        f"{epoch}:{full_version}" if epoch and full_version else full_version,
        arch=fields.get_text(ARCH),
        source=source[1] if source else None,
        source_version=source[2] if source and source[2] != full_version else None,
        license=fields.get_text(LICENSE),
    )


def _list_checksums(fields: _RpmHeader, numbers: Iterator[int]) -> Iterator[tuple[str, bytes]]:
    """Yield algorithm and checksum of each file, while there are `numbers` for the texts."""
    number = fields.get_number(ALGORITHM)
    if algorithm := ALGORITHMS.get(MD5 if number is None else number):
        for _, text in zip(numbers, fields.list_texts(DIGESTS), strict=False):
            if HEXADECIMAL.fullmatch(text):  # folders and links have none
                yield algorithm, bytes.fromhex(text.decode())


# What follows yields the header of each package, and b"" for what cannot be read.


def _read_sqlite_headers(file: ByteStream, _: int) -> Iterator[bytes]:
    import sqlite3

    with tempfile.NamedTemporaryFile(dir=get_disk_folder()) as copy:
        shutil.copyfileobj(file, copy)
        copy.flush()
        # SQLite reads only this file, without a journal, and writes nothing.
        name = f"{Path(copy.name).as_uri()}?mode=ro&immutable=1"
        try:
            with contextlib.closing(sqlite3.connect(name, uri=True)) as database:
                database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
                database.set_progress_handler(lambda: True, STEPS)  # interrupt a query that does not end
                database.execute("PRAGMA trusted_schema = OFF")
                columns = database.execute("SELECT hidden FROM pragma_table_xinfo('Packages')").fetchall()
                database.set_authorizer(_authorize_plain_read)
                # Generated columns are expressions, of which no authorizer is asked.
                if any(hidden for (hidden,) in columns):
                    raise sqlite3.DatabaseError("Packages has generated columns")
                for (header,) in database.execute("SELECT CAST(blob AS BLOB) FROM Packages"):
                    yield header or b""
        except (sqlite3.Error, UnicodeDecodeError):  # messages may quote what is there
            yield b""


def _authorize_plain_read(
    action: int, table: str | None, _: str | None, __: str | None, view: str | None
) -> int:
    """Allow SQLite to read the table Packages, but no view of this name.

    The expressions of a view may call functions that take hours, as one instruction of SQLite's machine.
    """
    import sqlite3

    is_read = action == sqlite3.SQLITE_READ and table == "Packages"
    return (
        sqlite3.SQLITE_OK
        if view is None and (is_read or action == sqlite3.SQLITE_SELECT)
        else sqlite3.SQLITE_DENY
    )


def _read_ndb_headers(file: ByteStream, size: int) -> Iterator[bytes]:
    with copy_stream(file, size) as window:
        head = window.read_at(0, NDB.size)
        if len(head) < NDB.size or not head.startswith(b"RpmP"):
            yield b""
            return
        _, _, _, pages = NDB.unpack(head)
        end = min(pages * PAGE, SLOTS + MOST_SLOTS * SLOT.size)
        for at in range(SLOTS, end, SLOT.size):
            slot = window.read_at(at, SLOT.size)
            if len(slot) < SLOT.size:
                yield b""
                return
            magic, package, block, _ = SLOT.unpack(slot)
            if magic == b"Slot" and package:
                start = block * BLOCK
                head = window.read_at(start, BLOB.size)
                if len(head) < BLOB.size or not head.startswith(b"BlbS"):
                    yield b""
                    continue
                _, _, _, length = BLOB.unpack(head)
                yield window.read_at(start + BLOB.size, min(length, LONGEST))


def _read_berkeley_headers(file: ByteStream, size: int) -> Iterator[bytes]:
    with copy_stream(file, size) as window:
        meta = window.read_at(0, META.size)
        magic, _, page = META.unpack(meta) if len(meta) == META.size else (0, 0, 0)
        if magic != HASH or page not in SIZES:
            yield b""
            return
        unread_pages = window.size // page
        for index in range(1, window.size // page):
            for first, length in _list_overflow_values(window.read_at(index * page, page)):
                parts: list[bytes] = []
                here, wanted = first, min(length, LONGEST)
                while here and wanted > 0 and unread_pages > 0:
                    unread_pages -= 1  # each page belongs to one entry
                    here, part = _read_overflow_page(window.read_at(here * page, page), wanted)
                    parts.append(part)
                    wanted -= len(part)
                yield b"".join(parts)


def _list_overflow_values(page: bytes) -> Iterator[tuple[int, int]]:
    """Yield the first page and the length of each value on overflow pages. Keys and values alternate."""
    _, entries, _, kind = HEAD.unpack_from(page)
    if kind in HASHED:
        offsets = struct.unpack_from(f"<{min(entries, (len(page) - HEAD.size) // 2)}H", page, HEAD.size)
        for offset in offsets[1::2]:
            if offset <= len(page) - OFFPAGE.size:
                where, first, length = OFFPAGE.unpack_from(page, offset)
                if where == ELSEWHERE:
                    yield first, length


def _read_overflow_page(page: bytes, wanted: int) -> tuple[int, bytes]:
    """Return the next page (0 at the end) and up to `wanted` bytes of an overflow page."""
    if len(page) < HEAD.size:
        return 0, b""
    following, _, used, kind = HEAD.unpack_from(page)
    return (following, page[HEAD.size :][: min(used, wanted)]) if kind == OVERFLOW else (0, b"")
