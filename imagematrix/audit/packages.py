"""The checksums of installed files in a distribution's package database.

dpkg records the MD5 of each file (/var/lib/dpkg/info/*.md5sums, or status.d in images built without dpkg),
apk the SHA-1 (/lib/apk/db/installed), rpm one of several (see `rpm`). The checksums distinguish the
distribution's files from the image's own. They prove nothing against whoever built the image, which contains
the database; and MD5 collisions can be constructed. Paths are not compared: they differ with a merged /usr.
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
    """Return the function that reads the package database at a path, or None if there is none at it.

    The function takes the file and its size. It yields the algorithm and the checksum of each installed file.
    """
    return next((reader for pattern, reader in DATABASES if pattern.fullmatch(path)), None)


class Sums:
    """The checksums of the files in packages."""

    def __init__(self) -> None:
        self._by_algorithm: dict[str, set[bytes]] = {}
        self._left = MOST

    def add(self, sums: Iterable[tuple[str, bytes]]) -> None:
        """Add checksums, each with its algorithm, up to `MOST` in all."""
        for algorithm, checksum in sums:
            if not self._left:
                return
            self._by_algorithm.setdefault(algorithm, set()).add(checksum)
            self._left -= 1

    def has(self, window: Window) -> bool:
        """Whether a package has a file with these bytes."""
        for algorithm, own in self._by_algorithm.items():
            # Builds of OpenSSL for FIPS refuse MD5 otherwise.
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
