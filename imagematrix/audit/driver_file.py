"""Recognizing a library of NVIDIA's user-mode driver, and its version."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

from imagematrix.audit.notes import Compat, compat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.audit.elf import Elf
    from imagematrix.audit.window import Window

__all__ = ["LIBRARIES", "Driver", "driver", "named"]

LIBRARIES = ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler")
NAME = re.compile(rf"({'|'.join(LIBRARIES)})\.so(?:\.(\d{{3}}(?:\.\d+)+))?(?:\.1)?", re.ASCII)
# libcuda also contains the versions of other drivers, but the files that it opens are named for its own.
# libnvidia-ml is smaller and contains its version as a separate string.
OPENED = (b"nvidia-application-profiles-", b"libnvidia-pkcs11.so.")
FOLLOWS = re.compile(rb"(\d{3}\.\d{2,3}(?:\.\d{2})?)[-\0]")
ALONE = re.compile(rb"\0(\d{3}\.\d{2,3}(?:\.\d{2})?)(?=\0)")
SMALL = 8 << 20  # bytes
LARGEST = 256 << 20  # bytes of a library that are searched for the version; libcuda has 30 MB
OVERLAP = 64
STUBS = "stubs"  # the folder of a toolkit with the libraries for linking
SMALLEST = 1 << 20  # bytes of a real driver library: a stub has a tenth of that, libnvidia-ml twice as much


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """A library of the user-mode driver: `name` is one of `LIBRARIES`, `kind` exact, compat or stub.

    `version` comes from its bytes, or else from its file name; None if neither states it.
    """

    name: str
    kind: str
    version: str | None
    compat: Compat | None = None


def named(path: str) -> tuple[str, str | None] | None:
    """Return the driver library that a file's name stands for and the version in the name, or None."""
    match = NAME.fullmatch(posixpath.basename(path))
    return (match[1], match[2]) if match else None


def driver(path: str, elf: Elf | None, window: Window) -> Driver | None:
    """Return the driver library that a file is, by its soname or its name, or None if it is none.

    `path` is its path in the image, `elf` its ELF headers, or None if it has none.
    """
    own = named(path)
    by_soname = named(elf.soname) if elf and elf.soname else None
    if own is None and by_soname is None:
        return None
    name = by_soname[0] if by_soname else own[0] if own else ""
    written = _version(window)
    version = written or (own[1] if own else None)
    note = compat(elf, window) if elf else None
    if window.size < SMALLEST and (version is None or STUBS in path.split("/")):
        kind = "stub"
    elif note is not None or "compat" in path.split("/"):
        kind = "compat"
    else:
        kind = "exact"
    return Driver(name=name, kind=kind, version=None if kind == "stub" else version, compat=note)


def _version(window: Window) -> str | None:
    """Return the version that the bytes state, or None if they state none or several."""
    versions: set[bytes] = set()
    for piece in window.pieces(LARGEST, OVERLAP):
        for word in OPENED:
            place = piece.find(word)
            while place != -1:
                match = FOLLOWS.match(piece, place + len(word))
                versions.update([match[1]] if match else [])
                place = piece.find(word, place + 1)
    if not versions and window.size <= SMALL:
        versions.update(ALONE.findall(window.at(0, SMALL)))
    return versions.pop().decode() if len(versions) == 1 else None
