"""The package databases of distributions: the packages, and the checksums of the files that they installed.

dpkg lists packages in /var/lib/dpkg/status, and the MD5 of each file in info/*.md5sums; images built without
dpkg have both in status.d. apk has the SHA-1 (/lib/apk/db/installed), rpm one of several (see `rpm`). The
checksums distinguish the distribution's files from the image's own. They prove nothing against whoever built
the image, which contains the database; and MD5 collisions can be constructed. Paths are not compared: they
differ with a merged /usr.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import partial
from itertools import chain

from imagematrix.audit.packages import rpm
from imagematrix.audit.packages.installed_package import Database, InstalledPackage, parse_apk, parse_dpkg

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import IO

    from imagematrix.audit.binaries.window import Window
    from imagematrix.audit.packages.rpm import Entry

    Reader = Callable[[IO[bytes], int], Iterator[Entry]]
    TextReader = Callable[[IO[bytes]], Iterator[Entry]]

LARGEST = 64 << 20  # bytes of a database that is a text; with 2,000 packages it has some 10 MB
MD5 = re.compile(rb"([0-9a-f]{32})  ")
SHA1 = re.compile(rb"Z:Q1([A-Za-z0-9+/]{27}=)\s*")
LONGEST_LINE = 64 << 10  # bytes
MOST = 1_000_000  # checksums; an image with 2,000 packages has some 300,000
MOST_PACKAGES = 50_000
PIECE = 1 << 20
FOLDER = "/var/lib/dpkg/status.d"  # of databases with one package each
DPKG_FIELDS = frozenset({"Package", "Status", "Version", "Architecture", "Source"})
APK_FIELDS = frozenset("PVALo")
ABSENT = ("not-installed", "config-files")  # states in which dpkg lists packages without files


def find_database_reader(path: str) -> Reader | None:
    """Return the function that reads the package database at a path, or None if there is none at it.

    The function takes the file and its size. It yields each package, None for an entry that cannot be read,
    and the algorithm and the checksum of each installed file.
    """
    return next((reader for pattern, reader in DATABASES if pattern.fullmatch(path)), None)


class Databases:
    """The package databases of a layer: their packages, and the checksums of the files in packages."""

    def __init__(self) -> None:
        self._by_algorithm: dict[str, set[bytes]] = {}
        self._remaining_checksums = MOST
        self._remaining_packages = MOST_PACKAGES

    def add(self, entries: Iterable[Entry]) -> Database:
        """Add the entries of a database, within the limits of a layer; return its packages."""
        installed: list[InstalledPackage] = []
        unread = 0
        for entry in entries:
            if isinstance(entry, tuple):
                algorithm, checksum = entry
                if self._remaining_checksums:
                    self._remaining_checksums -= 1
                    self._by_algorithm.setdefault(algorithm, set()).add(checksum)
            elif entry is not None and self._remaining_packages:
                self._remaining_packages -= 1
                installed.append(entry)
            else:
                unread += 1
        return Database(packages=tuple(installed), unread=unread)

    def has_file(self, window: Window) -> bool:
        """Whether a package has a file with these bytes."""
        for algorithm, checksums in self._by_algorithm.items():
            # Builds of OpenSSL for FIPS refuse MD5 otherwise.
            checksum = hashlib.new(algorithm, usedforsecurity=False)
            for at in range(0, window.size, PIECE):
                checksum.update(window.read_at(at, PIECE))
            if checksum.digest() in checksums:
                return True
        return False


def _read_text(reader: TextReader, file: IO[bytes], size: int) -> Iterator[Entry]:
    return reader(file) if size <= LARGEST else iter((None,))


def _read_md5sums(file: IO[bytes]) -> Iterator[Entry]:
    for line in _read_lines(file):
        if hexadecimal := MD5.match(line):
            yield "md5", bytes.fromhex(hexadecimal[1].decode())


def _read_dpkg(file: IO[bytes]) -> Iterator[Entry]:
    paragraph = _Paragraph(DPKG_FIELDS)
    for line in chain(_read_lines(file), (b"",)):  # the end of the file ends a paragraph, too
        fields = paragraph.take_line(line)
        if fields and fields.get("Status", "").rpartition(" ")[2] not in ABSENT:
            yield parse_dpkg(fields)


def _read_apk(file: IO[bytes]) -> Iterator[Entry]:
    paragraph = _Paragraph(APK_FIELDS)
    for line in chain(_read_lines(file), (b"",)):
        if encoded := SHA1.fullmatch(line):
            yield "sha1", base64.b64decode(encoded[1])
        # Names with a dot are those of groups: `apk add --virtual .build-deps`.
        elif (fields := paragraph.take_line(line)) and not fields.get("P", "").startswith("."):
            yield parse_apk(fields)


class _Paragraph:
    """The current paragraph of a database of lines: its `wanted` fields, the first of each name."""

    def __init__(self, wanted: frozenset[str]) -> None:
        self._wanted = {f"{name}:".encode(): name for name in wanted}
        self._fields: dict[str, str] = {}

    def take_line(self, line: bytes) -> Mapping[str, str] | None:
        """Take the next line; return the fields of the paragraph that it ends, None if it ends none."""
        if not line.strip():
            fields, self._fields = self._fields, {}
            return fields
        label, _, value = line.partition(b":")
        name = self._wanted.get(label + b":", "")
        self._fields.setdefault(name, value.decode("utf-8", "replace").strip() if name else "")
        return None


def _read_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file, the first bytes of those that are too long."""
    for line in iter(partial(file.readline, LONGEST_LINE), b""):
        rest = line
        while len(rest) == LONGEST_LINE and not rest.endswith(b"\n"):
            rest = file.readline(LONGEST_LINE)
        yield line


RPM_FOLDERS = ("/var/lib/rpm", "/usr/lib/sysimage/rpm", "/usr/share/rpm")
RPM_FILES = {"rpmdb.sqlite": rpm.read_sqlite, "Packages.db": rpm.read_ndb, "Packages": rpm.read_berkeley}
LISTS = (
    "/var/lib/dpkg/status",
    "/lib/apk/db/installed",
    "/usr/lib/apk/db/installed",
    *(f"{folder}/{name}" for folder in RPM_FOLDERS for name in RPM_FILES),
)
DATABASES: tuple[tuple[re.Pattern[str], Reader], ...] = (
    (re.compile(r"/var/lib/dpkg/(?:info|status\.d)/[^/]+\.md5sums"), partial(_read_text, _read_md5sums)),
    (re.compile(r"/var/lib/dpkg/status(?:\.d/[^/]+)?"), partial(_read_text, _read_dpkg)),
    (re.compile(r"/(?:usr/)?lib/apk/db/installed"), partial(_read_text, _read_apk)),
    *(
        (re.compile(f"(?:{'|'.join(RPM_FOLDERS)})/{re.escape(name)}"), reader)
        for name, reader in RPM_FILES.items()
    ),
)
