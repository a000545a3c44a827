"""What the layers of an image contain, as far as drivers and device code go: read from the bytes.

Layers lie upon each other as an engine unpacks them (layer.md of the OCI image specification): what one has
at a path, of whatever kind, hides what is below it there; two folders become one.
"""

from __future__ import annotations

import posixpath
import re
import tarfile
from dataclasses import dataclass, field

from imagematrix.errors import AuditError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["Contents", "Layer", "contents", "read"]

LIBCUDA = re.compile(r"libcuda\.so\.(\d{3}(?:\.\d+)+)", re.ASCII)
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
EXECUTABLE = 0o111  # of a file's mode
EM_CUDA = 190  # machine number of NVIDIA's device code in ELF headers
HEADER = 64  # bytes of an ELF header; that of 32-bit code is shorter
FLAGS = {1: 36, 2: 48}  # where e_flags are in it, by its class: ELF32 and ELF64
HOPS = 40  # links that the kernel follows before it gives up (path_resolution(7))
NEW_ABI = 8  # from this ABI version on (CUDA 13) the target is in the second byte of e_flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer: its drivers, cubins and programs by path, and the paths and folders that it takes away.

    `symlinks` and `hardlinks` have their targets by path. `paths` are all that it has, `folders` those of
    them that are folders.
    """

    drivers: Mapping[str, str]
    cubins: Mapping[str, str]
    programs: Mapping[str, int]
    removed: frozenset[str]
    emptied: frozenset[str]
    symlinks: Mapping[str, str]
    hardlinks: Mapping[str, str]
    paths: frozenset[str]
    folders: frozenset[str]


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
    symlinks: dict[str, str] = {}
    hardlinks: dict[str, str] = {}
    removed: set[str] = set()
    emptied: set[str] = set()
    paths: set[str] = set()
    folders: set[str] = set()
    kinds = (drivers, cubins, programs, symlinks, hardlinks)
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                name = _absolute(member.name)
                if _whiteout(name, removed, emptied):
                    continue
                for kind in kinds if name in paths else ():  # the last of several entries counts
                    kind.pop(name, None)
                folders.discard(name)
                paths.add(name)
                if member.isdir():
                    folders.add(name)
                elif member.issym():
                    symlinks[name] = member.linkname
                elif member.islnk():
                    hardlinks[name] = _absolute(member.linkname)
                elif member.isfile():
                    _file(archive, member, name, drivers, cubins, programs)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise AuditError(f"the layer {path.name} can't be read: {error}") from error
    for name in paths:
        folders.update(_above(name, folders))
    return Layer(
        drivers=drivers,
        cubins=cubins,
        programs=programs,
        removed=frozenset(removed),
        emptied=frozenset(emptied),
        symlinks=symlinks,
        hardlinks=hardlinks,
        paths=frozenset(paths | folders),
        folders=frozenset(folders),
    )


def _whiteout(name: str, removed: set[str], emptied: set[str]) -> bool:
    """Note what an entry takes away, if that is what it is for; return whether it is."""
    folder, base = posixpath.split(name)
    if base == OPAQUE:
        emptied.add(folder)
    elif base.startswith(WHITEOUT):
        removed.add(posixpath.join(folder, base.removeprefix(WHITEOUT)))
    else:
        return False
    return True


def contents(layers: Iterable[Layer]) -> Contents:
    """Return what is left to see when `layers` lie upon each other, the lowest first."""
    drivers: dict[str, str] = {}
    cubins: dict[str, str] = {}
    programs: dict[str, int] = {}
    symlinks: dict[str, str] = {}
    below: list[Layer] = []
    for layer in layers:
        for seen in (drivers, cubins, programs, symlinks):
            for path in [path for path in seen if _gone(path, layer)]:
                del seen[path]
        drivers |= layer.drivers
        cubins |= layer.cubins
        programs |= layer.programs
        symlinks |= layer.symlinks
        for path, target in layer.hardlinks.items():
            named = LIBCUDA.fullmatch(posixpath.basename(path))
            if named:
                drivers[path] = named[1]
            if target in cubins:
                cubins[path] = cubins[target]
            if target in programs:
                programs[path] = programs[target]
        below.append(layer)
    for path in symlinks:  # one to a driver of another name is no second one
        named = LIBCUDA.fullmatch(posixpath.basename(path))
        file = _followed(path, symlinks) if named else None
        if named and file and file not in drivers and _is_there(file, below):
            drivers[path] = named[1]
    return Contents(drivers=drivers, cubins=cubins, programs=programs)


def _absolute(name: str) -> str:
    return posixpath.normpath("/" + name.lstrip("/"))


def _above(path: str, known: Container[str]) -> Iterator[str]:
    """Yield the folders above a path, up to the first that is known."""
    while (path := posixpath.dirname(path)) != "/" and path not in known:
        yield path


def _gone(path: str, layer: Layer) -> bool:
    """Whether a layer hides what is below it at a path, or takes it away."""
    if path in layer.paths:
        return True
    while path != "/":
        if path in layer.removed or (path in layer.paths and path not in layer.folders):
            return True
        path = posixpath.dirname(path)
        if path in layer.emptied:
            return True
    return False


def _followed(path: str, symlinks: Mapping[str, str]) -> str | None:
    """Return the path that a path stands for when links are followed; None where they lead nowhere."""
    at, hops = "/", 0
    ahead = path.split("/")[::-1]
    while ahead:
        part = ahead.pop()
        at = posixpath.normpath(posixpath.join(at, part))
        if part and at in symlinks:
            hops += 1
            if hops > HOPS:
                return None
            target = symlinks[at]
            at = "/" if target.startswith("/") else posixpath.dirname(at)
            ahead += target.split("/")[::-1]
    return at


def _is_there(path: str, layers: Sequence[Layer]) -> bool:
    for layer in reversed(layers):
        if path in layer.paths:
            return path not in layer.folders
        if _gone(path, layer):
            return False
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
    # No more than that: device code has gigabytes.
    head = file.read(HEADER) if file else b""
    if head[:4] != b"\x7fELF":
        return
    machine = int.from_bytes(head[18:20], "little")
    if machine == EM_CUDA:
        target = _target(head)
        if target:
            cubins[name] = target
    elif member.mode & EXECUTABLE:
        programs[name] = machine


def _target(head: bytes) -> str | None:
    """Return the target of a cubin, such as "89", from its header; None where that makes no sense."""
    place = FLAGS.get(head[4])
    if place is None or len(head) < HEADER:
        return None
    flags = int.from_bytes(head[place : place + 4], "little")
    number = flags >> 8 & 0xFF if head[8] >= NEW_ABI else flags & 0xFF
    return str(number) if number else None
