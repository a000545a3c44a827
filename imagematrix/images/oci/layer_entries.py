"""Listing what a layer has, from its tar: entries by path, whiteouts, and the limits of both."""

from __future__ import annotations

import posixpath
import tarfile
from typing import Generic, TypeVar

from imagematrix.images.oci.tree import Folder, Hardlink, Symlink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.images.oci.byte_stream import ByteStream
    from imagematrix.images.oci.decompression import DecompressedStream

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
PIECE = 1 << 20
MOST = 4_000_000  # entries of a layer
LONGEST_PATH = 4096  # characters of a path, or of the target of a link (PATH_MAX)
LONGEST_NAME = 255  # characters of a name (NAME_MAX)
DEEPEST = 256  # levels of folders
LONGEST_NAMES = 1 << 28  # characters of all paths of a layer, with those of the folders on the way
RATIO = 100  # limit for the size of a sparse file, as a multiple of its stored bytes

F = TypeVar("F")


class LayerListing(Generic[F]):
    """The entries of a layer by path, the paths that it removes, and the folders that it empties.

    If the archive has several entries for a path, the last one counts. Methods raise tarfile.ReadError.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Folder | Symlink | Hardlink | F] = {}
        self.removed: set[str] = set()
        self.emptied: set[str] = set()
        self.names_size = 0  # characters of all paths
        self._used: set[str] = set()  # paths that other entries depend on: folders, targets of hard links

    def read_path(self, member: tarfile.TarInfo) -> str | None:
        """Return the path of a member, or None if it is a whiteout, which is noted."""
        path = make_absolute(member.name)
        self._count_name(path)
        folder, name = posixpath.split(path)
        if name == OPAQUE:
            self.emptied.add(folder)
        elif name.startswith(WHITEOUT):
            self.removed.add(posixpath.join(folder, name.removeprefix(WHITEOUT)))
        else:
            return path
        return None

    def read_link(self, member: tarfile.TarInfo) -> Symlink | Hardlink | None:
        """Return the entry of a link, None if the member is none."""
        if member.issym():
            return Symlink(_shorten_name(member.linkname))
        return Hardlink(make_absolute(member.linkname)) if member.islnk() else None

    def add(self, path: str, entry: Folder | Symlink | Hardlink | F, *, alike: Iterable[object] = ()) -> None:
        """Add an entry, replacing an earlier one at its path.

        Refuses that if other entries depend on the earlier one, unless it is a folder or one of `alike`: an
        entry that stands for many files.
        """
        old = self.entries.get(path)
        if old != entry:
            self.entries.pop(path, None)
        harmless = old is None or isinstance(old, Folder) or old in alike
        if path in self._used and not harmless and (old != entry or not isinstance(old, Symlink | Hardlink)):
            raise tarfile.ReadError(f"{path} is replaced after another entry that depends on it")
        self.entries[path] = entry
        for needed in (posixpath.dirname(path), *((entry.target,) if isinstance(entry, Hardlink) else ())):
            here = needed
            while here not in self._used and here != "/":
                self._used.add(here)
                self._count_name(here)
                here = posixpath.dirname(here)

    def _count_name(self, path: str) -> None:
        self.names_size += len(path)
        if self.names_size > LONGEST_NAMES:
            raise tarfile.ReadError(f"its paths have more than {LONGEST_NAMES} characters")


def list_members(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a layer's tar; raise tarfile.ReadError if they are too many."""
    for index, member in enumerate(archive):
        if index > MOST:
            raise tarfile.ReadError(f"more than {MOST} files")
        yield member


def read_to_the_end(archive: tarfile.TarFile, stream: ByteStream, expanded: DecompressedStream) -> None:
    """Read `stream`, which reads from `expanded`, to the end, to verify that it is complete.

    tarfile accepts any end.
    """
    if archive.offset >= expanded.produced + tarfile.BLOCKSIZE:  # the last block may be cut
        raise EOFError("it is truncated")
    while stream.read(PIECE):
        pass


def require_dense(member: tarfile.TarInfo, path: str) -> None:
    """Raise tarfile.ReadError if a sparse file is far larger than what the archive has of it."""
    parts: Iterable[tuple[int, int]] = member.sparse or ()  # type: ignore[assignment]  # places and sizes
    if member.issparse() and member.size > RATIO * (tarfile.BLOCKSIZE + sum(size for _, size in parts)):
        raise tarfile.ReadError(f"the sparse file {path} is too large: {member.size} bytes")


def make_absolute(name: str) -> str:
    """Return the path of a member in the image; raise tarfile.ReadError."""
    if ".." in name.split("/"):
        raise tarfile.ReadError(f"the path {name[:200]!r} leads out of the image")
    path = posixpath.normpath("/" + _shorten_name(name).lstrip("/"))
    if (levels := path.count("/")) > DEEPEST:
        raise tarfile.ReadError(f"the path {path[:80]!r}… has {levels} levels")
    return path


def _shorten_name(name: str) -> str:
    if len(name) > LONGEST_PATH:  # no file system allows it, and handling it costs time
        raise tarfile.ReadError(f"the path {name[:80]!r}… has {len(name)} characters")
    return name
