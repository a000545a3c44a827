"""The libraries of NVIDIA's user-mode driver: their names, and the version that their bytes state."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

LIBRARIES = ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler")
NAME = re.compile(rf"({'|'.join(LIBRARIES)})\.so(?:\.(\d{{3}}(?:\.\d+)+))?(?:\.1)?", re.ASCII)
# libcuda also contains the versions of other drivers, but the files that it opens are named for its own.
# libnvidia-ml is smaller and contains its version as a separate string.
OPENED = (b"nvidia-application-profiles-", b"libnvidia-pkcs11.so.")
FOLLOWS = re.compile(rb"(\d{3}\.\d{2,3}(?:\.\d{2})?)[-\0]")
ALONE = re.compile(rb"\0(\d{3}\.\d{2,3}(?:\.\d{2})?)(?=\0)")
SMALL = 8 << 20  # bytes
LARGEST = 256 << 20  # bytes of a library that are searched for the version; libcuda has 30 MB
PIECE = 1 << 20  # bytes that are searched at once
OVERLAP = 64  # bytes of the next piece, for a version across the border


def parse_file_name(path: str) -> tuple[str, str | None] | None:
    """Return the driver library that a file's name stands for and the version in the name, or None."""
    match = NAME.fullmatch(path.rpartition("/")[2])
    return (match[1], match[2]) if match else None


def read_version(size: int, at: Callable[[int, int], bytes]) -> str | None:
    """Return the version that a library's bytes state, or None if they state none or several.

    `at` returns up to so many of its `size` bytes from an offset on: `at(offset, count)`.
    """
    versions: set[bytes] = set()
    for offset in range(0, min(size, LARGEST), PIECE):
        piece = at(offset, PIECE + OVERLAP)
        for word in OPENED:
            start = piece.find(word)
            while start != -1:
                match = FOLLOWS.match(piece, start + len(word))
                versions.update([match[1]] if match else [])
                start = piece.find(word, start + 1)
    if not versions and size <= SMALL:
        versions.update(ALONE.findall(at(0, SMALL)))
    return versions.pop().decode() if len(versions) == 1 else None
