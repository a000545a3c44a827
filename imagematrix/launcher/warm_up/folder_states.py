"""What a folder of a container has: the state of each file, from the engine's tar of it or from disk."""

from __future__ import annotations

import hashlib
import math
import posixpath
import tarfile
from dataclasses import dataclass

from imagematrix.errors import UsageError
from imagematrix.images.oci.tar import open_tar
from imagematrix.images.warm.layer import LATEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.images.oci.byte_stream import ByteStream

MOST = 1_000_000  # files of a folder
PIECE = 1 << 20  # bytes to read at once
ELF = b"\x7fELF"


class TooLargeError(Exception):
    """A folder has more bytes of files than it may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileState:
    """What tells whether a file was written anew: its kind, its content, and when it was last modified.

    `kind` is the type in a tar's header, of a hard link that of its file. `size` is in bytes, `mtime` in
    whole seconds since 1970, of another time the nearest that a layer can have. `content` is the digest of a
    file's content, the target of a symbolic link, and else empty. `is_elf` is for files of machine code.
    """

    kind: bytes
    size: int
    mtime: int
    content: str
    is_elf: bool = False

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder, whose time says nothing: it changes with each lock in it."""
        return self.kind == tarfile.DIRTYPE


def read_states(stream: ByteStream, root: str, max_size: float = math.inf) -> dict[str, FileState]:
    """Return the state of each file below the folder `root`, by its absolute path, and of `root` itself.

    `stream` is the tar in which the engine sends the folder: names begin with the last part of `root`. Raises
    UsageError if it has more than MOST files, tarfile.TarError if it is damaged, and TooLargeError, before it
    reads them, if its files have more than `max_size` bytes: holes count, and take as long to read as data.
    """
    parent = posixpath.dirname(root)
    states: dict[str, FileState] = {}
    size = 0
    with open_tar(stream) as archive:
        for member in archive:
            path = posixpath.normpath(posixpath.join(parent, member.name.lstrip("/")))
            if len(states) >= MOST:
                raise UsageError(f"{root} has more than {MOST:,} files", remedy="let the program cache less")
            if member.islnk():
                linked = posixpath.normpath(posixpath.join(parent, member.linkname.lstrip("/")))
                if linked in states:
                    states[path] = states[linked]
                    continue
            size += member.size if member.isreg() else 0
            if size > max_size:
                raise TooLargeError
            states[path] = _read_state(archive, member)
    return states


def find_changed(before: Mapping[str, FileState], after: Mapping[str, FileState]) -> frozenset[str]:
    """Return the paths of files that are new or were written anew; folders do not count."""
    return frozenset(
        path for path, state in after.items() if not state.is_folder and before.get(path) != state
    )


def find_removed(before: Mapping[str, FileState], after: Mapping[str, FileState]) -> frozenset[str]:
    """Return the paths of files that are gone; folders do not count."""
    return frozenset(path for path, state in before.items() if not state.is_folder and path not in after)


def _read_state(archive: tarfile.TarFile, member: tarfile.TarInfo) -> FileState:
    content, is_elf = member.linkname if member.issym() else "", False
    file = archive.extractfile(member) if member.isreg() else None
    if file is not None:
        head = file.read(PIECE)
        is_elf, found = head.startswith(ELF), hashlib.sha256(head)
        while piece := file.read(PIECE):
            found.update(piece)
        content = found.hexdigest()
    # A folder's size depends on the file system.
    size = member.size if member.isreg() else 0
    mtime = min(max(int(member.mtime), 0), LATEST)
    return FileState(kind=member.type, size=size, mtime=mtime, content=content, is_elf=is_elf)
