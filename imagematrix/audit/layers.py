"""What the layers of an image contain, as far as drivers and device code go: read from the bytes."""

from __future__ import annotations

import io
import posixpath
import re
import tarfile
from dataclasses import dataclass, field

from imagematrix.errors import AuditError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path
    from typing import TypeVar

    T = TypeVar("T")

__all__ = ["Contents", "Layer", "contents", "read"]

LIBCUDA = re.compile(r"libcuda\.so\.(\d{3}(?:\.\d+)+)", re.ASCII)
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
EXECUTABLE = 0o111  # of a file's mode
EM_CUDA = 190  # machine number of NVIDIA's device code in ELF headers
CUBIN_LIMIT = 512 * 1024 * 1024  # bytes
NEW_ABI = 8  # from this ABI version on (CUDA 13) the target is in the second byte of e_flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer: its drivers, cubins and programs by path, and the paths and folders that it takes away."""

    drivers: Mapping[str, str]
    cubins: Mapping[str, str]
    programs: Mapping[str, int]
    removed: frozenset[str]
    emptied: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What an image contains: versions of libcudas, targets of cubins ("89"), machines of programs.

    All are by path. Machines have the numbers of ELF headers: 62 is x86-64, 183 aarch64.
    """

    drivers: Mapping[str, str]
    cubins: Mapping[str, str]
    programs: Mapping[str, int] = field(default_factory=dict)


def read(path: Path) -> Layer:
    """Return what the layer in the file `path` (a tar, perhaps compressed) holds; raise AuditError."""
    drivers: dict[str, str] = {}
    cubins: dict[str, str] = {}
    programs: dict[str, int] = {}
    removed: set[str] = set()
    emptied: set[str] = set()
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                name = posixpath.normpath("/" + member.name.lstrip("/"))
                folder, base = posixpath.split(name)
                if base == OPAQUE:
                    emptied.add(folder)
                elif base.startswith(WHITEOUT):
                    removed.add(posixpath.join(folder, base.removeprefix(WHITEOUT)))
                elif member.isfile():
                    _file(archive, member, name, drivers, cubins, programs)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise AuditError(f"the layer {path.name} can't be read: {error}") from error
    return Layer(
        drivers=drivers,
        cubins=cubins,
        programs=programs,
        removed=frozenset(removed),
        emptied=frozenset(emptied),
    )


def contents(layers: Iterable[Layer]) -> Contents:
    """Return what is left to see when `layers` lie upon each other, the lowest first."""
    drivers: dict[str, str] = {}
    cubins: dict[str, str] = {}
    programs: dict[str, int] = {}
    for layer in layers:
        _lay(drivers, layer.drivers, layer)
        _lay(cubins, layer.cubins, layer)
        _lay(programs, layer.programs, layer)
    return Contents(drivers=drivers, cubins=cubins, programs=programs)


def _lay(seen: dict[str, T], own: Mapping[str, T], layer: Layer) -> None:
    if layer.removed or layer.emptied:
        for path in [path for path in seen if _gone(path, layer)]:
            del seen[path]
    seen.update(own)


def _gone(path: str, layer: Layer) -> bool:
    while path != "/":
        if path in layer.removed:
            return True
        path = posixpath.dirname(path)
        if path in layer.emptied:
            return True
    return False


def _file(
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    name: str,
    drivers: dict[str, str],
    cubins: dict[str, str],
    programs: dict[str, int],
) -> None:
    driver = LIBCUDA.fullmatch(posixpath.basename(name))
    if driver:
        drivers[name] = driver[1]
        return
    file = archive.extractfile(member)
    head = file.read(20) if file else b""
    if file is None or head[:4] != b"\x7fELF":
        return
    machine = int.from_bytes(head[18:20], "little")
    if machine == EM_CUDA:
        target = _target(head + file.read(CUBIN_LIMIT))
        if target:
            cubins[name] = target
    elif member.mode & EXECUTABLE:
        programs[name] = machine


def _target(code: bytes) -> str | None:
    """Return the target of a cubin, such as "89"; None where the header makes no sense."""
    # Slow to load, and most images have no device code.
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        header = ELFFile(io.BytesIO(code)).header
    except (ELFError, ValueError, AssertionError):
        return None
    flags = int(header["e_flags"])
    number = flags >> 8 & 0xFF if header["e_ident"]["EI_ABIVERSION"] >= NEW_ABI else flags & 0xFF
    return str(number) if number else None
