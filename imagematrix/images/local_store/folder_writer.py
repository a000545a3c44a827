"""Writing an image's files into a folder, as an ordinary user, who owns all of them then.

Each folder of a path is opened by its name in the one before and no link is followed, so nothing is written
outside. Folders get their modes and times at the end, because they may not be writable. The content of files
may come before it is known where they belong: it is then written under numbers, and renamed.
"""

from __future__ import annotations

import contextlib
import os
import tarfile
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Self

    from imagematrix.images.local_store.merged_image import MergedFile

INSIDE = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
OWNED = 0o777  # the bits of a mode that are kept: files that become this user's may not be setuid
ALL = 0o700


def write_folder(
    path: Path, members: Iterable[MergedFile], *, on_bytes: Callable[[int], object] = lambda _: None
) -> None:
    """Write the members into the new folder `path`; raises OSError, and what `members` raises.

    `on_bytes` is told the bytes of content as they are written. Everything has the user's own group, also in
    a folder that gives its group to what is in it: of other groups, a container of an ordinary user knows
    none, and the kernel copies no file of theirs when it is changed.
    """
    _make_own_folder(path)
    folders: list[MergedFile] = []
    with _Inside(path) as inside:
        for member in members:
            if member.kind == tarfile.DIRTYPE:
                folders.append(member)
                if member.path != "/":
                    parent, _, name = member.path.rpartition("/")
                    os.mkdir(name, ALL, dir_fd=inside.get_folder(parent))
            else:
                _write_member(inside, member, on_bytes)
        for folder in reversed(folders):  # the deepest first
            descriptor = inside.get_folder(folder.path)
            os.fchmod(descriptor, folder.mode & OWNED)
            os.utime(descriptor, (folder.mtime, folder.mtime))


class WrittenContents:
    """The contents of files in the new folder `path`, by the number of their layer and their place in it.

    No name that a layer has is used, so whatever the layer says, its files are in its own folder. Before each
    file, `require_space` gets its size. Writing raises what that does, OSError, and AuditError for a file
    that is truncated.
    """

    def __init__(self, path: Path, require_space: Callable[[int], object]) -> None:
        self._path = path
        self._require_space = require_space
        _make_own_folder(path)

    def write(self, layer: int, place: int, file: MergedFile) -> None:
        """Write the content of a file, by any thread; the files of a layer come in order."""
        self._require_space(file.size)
        path = self.get_path(layer, place)
        try:
            _write_file(path, file, lambda _: None)
        except FileNotFoundError:  # the first of its layer
            Path(path).parent.mkdir(ALL)
            _write_file(path, file, lambda _: None)

    def get_path(self, layer: int, place: int) -> str:
        """Return the path of what was written."""
        return f"{self._path}/{layer}/{place}"


def remove_tree(path: Path) -> None:
    """Remove a folder with everything in it, whatever the modes of this user's folders; raise OSError."""
    if path.is_symlink():  # which chmod would follow
        path.unlink()
        return
    with contextlib.suppress(PermissionError):  # the folder of another user, who may let a group write there
        path.chmod(ALL)
    descriptor = os.open(path, INSIDE)
    try:
        _empty_folder(descriptor)
    finally:
        os.close(descriptor)
    path.rmdir()


def _make_own_folder(path: Path) -> None:
    path.mkdir(ALL)
    os.chown(path, -1, os.getegid())
    path.chmod(ALL)  # the new folder has the setgid bit of the one that it is in


def _empty_folder(folder: int) -> None:
    with os.scandir(folder) as entries:
        below = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in below:
        if not is_folder:
            os.unlink(name, dir_fd=folder)
            continue
        with contextlib.suppress(PermissionError):
            os.chmod(name, ALL, dir_fd=folder)
        descriptor = os.open(name, INSIDE, dir_fd=folder)
        try:
            _empty_folder(descriptor)
        finally:
            os.close(descriptor)
        os.rmdir(name, dir_fd=folder)


class _Inside:
    """Descriptors of folders in the folder `root`; the last one stays open."""

    def __init__(self, root: Path) -> None:
        self._root = os.open(root, INSIDE)
        self._last = "", os.dup(self._root)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._last[1])
        os.close(self._root)

    def get_folder(self, path: str) -> int:
        """Return the descriptor of a folder, valid until the next call."""
        if path != self._last[0]:
            opened = self.open_folder(path)
            os.close(self._last[1])
            self._last = path, opened
        return self._last[1]

    def open_folder(self, path: str) -> int:
        """Open a folder."""
        here = os.dup(self._root)
        for name in path.split("/"):
            if name:
                try:
                    below = os.open(name, INSIDE, dir_fd=here)
                finally:
                    os.close(here)
                here = below
        return here


def _write_member(inside: _Inside, member: MergedFile, on_bytes: Callable[[int], object]) -> None:
    parent, _, name = member.path.rpartition("/")
    folder = inside.get_folder(parent)
    if member.kind == tarfile.LNKTYPE:
        first, _, target = member.target.rpartition("/")
        source = inside.open_folder(first)
        try:
            os.link(target, name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(source)
        return
    if member.kind == tarfile.SYMTYPE:
        os.symlink(member.target, name, dir_fd=folder)
        os.utime(name, (member.mtime, member.mtime), dir_fd=folder, follow_symlinks=False)
        return
    if member.written:
        os.rename(member.written, name, dst_dir_fd=folder)
    else:
        _write_file(name, member, on_bytes, folder)


def _write_file(
    path: str, member: MergedFile, on_bytes: Callable[[int], object], folder: int | None = None
) -> None:
    """Write a regular file at a `path` in an open `folder`, with its mode and time."""
    descriptor = os.open(path, NEW, 0o600, dir_fd=folder)
    try:
        for piece in member.read_pieces(on_bytes):
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fchmod(descriptor, member.mode & OWNED)
        os.utime(descriptor, (member.mtime, member.mtime))
    finally:
        os.close(descriptor)
