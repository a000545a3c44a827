"""The checksums that a distribution's package database has of the files that it installed.

dpkg keeps the MD5 of each file (/var/lib/dpkg/info/*.md5sums, and status.d in images made without it), apk
the SHA-1 (/lib/apk/db/installed), rpm any (see `rpm`). A file with such a checksum has the bytes that a
package brought. That proves nothing against who makes an image: the database is a part of it, and MD5 can be
made to collide. It tells the distribution's files from the image's own. Paths are not compared: with a merged
/usr they differ.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import partial

from imagematrix.audit import rpm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import IO

    from imagematrix.audit.window import Window

    Reader = Callable[[IO[bytes], int], Iterator[tuple[str, bytes]]]

__all__ = ["Sums", "database"]

MD5 = re.compile(rb"([0-9a-f]{32})  ")
SHA1 = re.compile(rb"Z:Q1([A-Za-z0-9+/]{27}=)\s*")
LONGEST_LINE = 64 << 10  # bytes
MOST = 1_000_000  # checksums; an image with 2,000 packages has some 300,000
PIECE = 1 << 20


def database(path: str) -> Reader | None:
    """Return what reads the checksums in the database at a path; None where it is none.

    It takes the file and its size, and yields algorithm and checksum of each file that it knows.
    """
    return next((reader for pattern, reader in DATABASES if pattern.fullmatch(path)), None)


class Sums:
    """Checksums of packages' files."""

    def __init__(self) -> None:
        self._known: dict[str, set[bytes]] = {}
        self._left = MOST

    def add(self, sums: Iterable[tuple[str, bytes]]) -> None:
        """Add checksums, each with its algorithm, as long as there is room for them."""
        for algorithm, checksum in sums:
            if not self._left:
                return
            self._known.setdefault(algorithm, set()).add(checksum)
            self._left -= 1

    def has(self, window: Window) -> bool:
        """Whether a file has the bytes of one of a package."""
        for algorithm, own in self._known.items():
            checksum = hashlib.new(algorithm, usedforsecurity=False)
            for at in range(0, window.size, PIECE):
                checksum.update(window.at(at, PIECE))
            if checksum.digest() in own:
                return True
        return False


def _dpkg(file: IO[bytes], _: int) -> Iterator[tuple[str, bytes]]:
    for line in _lines(file):
        if hexadecimal := MD5.match(line):
            yield "md5", bytes.fromhex(hexadecimal[1].decode())


def _apk(file: IO[bytes], _: int) -> Iterator[tuple[str, bytes]]:
    for line in _lines(file):
        if encoded := SHA1.fullmatch(line):
            yield "sha1", base64.b64decode(encoded[1])


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    return iter(partial(file.readline, LONGEST_LINE), b"")


RPM = "/(?:var/lib|usr/lib/sysimage|usr/share)/rpm/"
DATABASES: tuple[tuple[re.Pattern[str], Reader], ...] = (
    (re.compile(r"/var/lib/dpkg/(?:info|status\.d)/[^/]+\.md5sums"), _dpkg),
    (re.compile(r"/(?:usr/)?lib/apk/db/installed"), _apk),
    (re.compile(RPM + r"rpmdb\.sqlite"), rpm.sqlite),
    (re.compile(RPM + r"Packages\.db"), rpm.ndb),
    (re.compile(RPM + r"Packages"), rpm.berkeley),
)
