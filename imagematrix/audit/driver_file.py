"""NVIDIA's user-mode driver, file by file: which library of it one is, and of which version."""

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
# libcuda has the versions of other drivers in it, too, but opens files of its own version; libnvidia-ml,
# which is smaller, has its own as a string by itself.
OPENED = (b"nvidia-application-profiles-", b"libnvidia-pkcs11.so.")
FOLLOWS = re.compile(rb"(\d{3}\.\d{2,3}(?:\.\d{2})?)[-\0]")
ALONE = re.compile(rb"\0(\d{3}\.\d{2,3}(?:\.\d{2})?)(?=\0)")
SMALL = 8 << 20  # bytes
LARGEST = 256 << 20  # bytes of a library that are searched for it; libcuda has 30 MB
OVERLAP = 64
STUBS = "stubs"  # the folder in which toolkits have libraries to link with
SMALLEST = 1 << 20  # bytes of a driver's library: a stub has a tenth of that, libnvidia-ml twice


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """A library of the user-mode driver: `name` is one of `LIBRARIES`, `kind` exact, compat or stub.

    `version` is the one that its bytes tell, or else its name; None where neither does.
    """

    name: str
    kind: str
    version: str | None
    compat: Compat | None = None


def named(path: str) -> tuple[str, str | None] | None:
    """Return the library of the driver that a file is by its name, and its version there; None of others."""
    match = NAME.fullmatch(posixpath.basename(path))
    return (match[1], match[2]) if match else None


def driver(path: str, elf: Elf | None, window: Window) -> Driver | None:
    """Return what of the driver a file is, by its soname or its name; None where it is nothing of it.

    `path` is where it was found, `elf` its headers, None where it has none.
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
    """Return the version that the bytes tell; None where they tell none or several."""
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
