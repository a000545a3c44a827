"""Recognizing a library of NVIDIA's user-mode driver, and its version."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.audit.binaries.notes import Compat, read_compat
from imagematrix.hardware.vendors import gpus, user_mode
from imagematrix.images.catalog.catalog import UserModeDriver

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.audit.binaries.elf import Elf
    from imagematrix.audit.binaries.window import Window

STUBS = "stubs"  # the folder of a toolkit with the libraries for linking
SMALLEST = 1 << 20  # bytes of a real driver library: a stub has a tenth of that, libnvidia-ml twice as much


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverLibrary:
    """A library of the user-mode driver: `name` is one of `user_mode.LIBRARIES`.

    `kind` is exact, compat or stub. `version` comes from its bytes, or else from its file
    name; None if neither states it.
    """

    name: str
    kind: str
    version: str | None
    compat: Compat | None = None


def identify_driver(path: str, elf: Elf | None, window: Window) -> DriverLibrary | None:
    """Return the driver library that a file is, by its soname or its name, or None if it is none.

    `path` is its path in the image, `elf` its ELF headers, or None if it has none.
    """
    by_path = user_mode.parse_file_name(path)
    by_name = (elf and elf.soname and user_mode.parse_file_name(elf.soname)) or by_path
    if not by_name:
        return None
    version = user_mode.read_version(window.size, window.read_at) or (by_path[1] if by_path else None)
    note = read_compat(elf, window) if elf else None
    if window.size < SMALLEST and (version is None or STUBS in path.split("/")):
        kind = "stub"
    elif note is not None or "compat" in path.split("/"):
        kind = "compat"
    else:
        kind = "exact"
    version = None if kind == "stub" else version
    return DriverLibrary(name=by_name[0], kind=kind, version=version, compat=note)


def describe_driver(libcuda: DriverLibrary) -> UserModeDriver:
    """Return the driver of an image whose loader takes this libcuda, which is no stub.

    The branches and brands of cuda-compat are those of its note; there are none if it has no note.
    """
    if libcuda.kind != "compat":
        return UserModeDriver(mode="exact", version=libcuda.version)
    note = libcuda.compat or Compat()
    brands = [gpus.BRANDS[brand] for brand in note.brands if brand in gpus.BRANDS]
    return UserModeDriver(
        mode="compat", version=libcuda.version, branches=note.branches, brands=tuple(sorted(brands))
    )
