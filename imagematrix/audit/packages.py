"""The checksums that a distribution's package database has of the files that it installed.

dpkg keeps the MD5 of each file (/var/lib/dpkg/info/*.md5sums, and status.d in images made without it), apk
the SHA-1 (/lib/apk/db/installed). A file with such a checksum has the bytes that a package brought. That
proves nothing against who makes an image: the database is a part of it, and MD5 can be made to collide. It
tells the distribution's files from the image's own. Paths are not compared: with a merged /usr they differ.
"""

from __future__ import annotations

import base64
import hashlib
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.audit.window import Window

__all__ = ["Sums", "database"]

DATABASES = (
    ("md5", re.compile(r"/var/lib/dpkg/(?:info|status\.d)/[^/]+\.md5sums")),
    ("sha1", re.compile(r"/(?:usr/)?lib/apk/db/installed")),
)
MD5 = re.compile(rb"([0-9a-f]{32})  ")
SHA1 = re.compile(rb"Z:Q1([A-Za-z0-9+/]{27}=)\s*")
MOST = 2_000_000  # checksums
PIECE = 1 << 20


def database(path: str) -> str | None:
    """Return the algorithm of the checksums in a file at a path; None where it is no such database."""
    return next((algorithm for algorithm, pattern in DATABASES if pattern.fullmatch(path)), None)


class Sums:
    """Checksums of packages' files."""

    def __init__(self) -> None:
        self._known: dict[str, set[bytes]] = {}
        self._left = MOST

    def add(self, algorithm: str, lines: Iterable[bytes]) -> None:
        """Add the checksums that a database has; other lines are none."""
        own = self._known.setdefault(algorithm, set())
        for line in lines:
            if self._left and (found := _sum(algorithm, line)):
                own.add(found)
                self._left -= 1

    def has(self, window: Window) -> bool:
        """Whether a file has the bytes of one of a package."""
        for algorithm, own in self._known.items():
            found = hashlib.new(algorithm, usedforsecurity=False)
            for at in range(0, window.size, PIECE):
                found.update(window.at(at, PIECE))
            if found.digest() in own:
                return True
        return False


def _sum(algorithm: str, line: bytes) -> bytes | None:
    if algorithm == "md5":
        hexadecimal = MD5.match(line)
        return bytes.fromhex(hexadecimal[1].decode()) if hexadecimal else None
    encoded = SHA1.fullmatch(line)
    return base64.b64decode(encoded[1]) if encoded else None
