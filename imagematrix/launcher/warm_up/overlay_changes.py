"""What a container changed, from the upper folder of its overlay; see overlayfs.rst of the kernel.

The folder is read after the last process that could change it has ended. No link in it is followed: each
leads somewhere in the container.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
import tempfile
from dataclasses import dataclass

from imagematrix.common.temp_folder import get_disk_folder
from imagematrix.images.warm.tools import ROOT
from imagematrix.launcher.warm_up.folder_states import FileState, read_states
from imagematrix.launcher.warm_up.program_run import list_parents

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import IO

OPAQUE = "user.overlay.opaque"  # an attribute of a folder that hides the one of the same path below it
INSIDE = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READABLE, SEARCHABLE = 0o400, 0o700


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderChanges:
    """What is at the paths of a folder: `states` of what was written, paths that are `hidden` or `emptied`.

    Hidden are those below what is no folder, or was removed, and it itself; of an emptied folder, all below.
    """

    states: Mapping[str, FileState]
    hidden: frozenset[str]
    emptied: frozenset[str]

    def apply(self, before: Mapping[str, FileState]) -> dict[str, FileState]:
        """Return the states of the files after the changes."""

        def is_left(path: str) -> bool:
            parents = list_parents(path)
            return self.hidden.isdisjoint((path, *parents)) and self.emptied.isdisjoint(parents)

        return {**{path: state for path, state in before.items() if is_left(path)}, **self.states}


NO_CHANGES = FolderChanges(states={}, hidden=frozenset(), emptied=frozenset())


def read_caches(root: str) -> dict[str, FileState]:
    """Return the states of the caches in the folder `root` of an image's files, none if it has none."""
    with _open_caches(os.open(root, INSIDE)) as (folder, _):
        return {} if folder is None else _read_folder(folder, None)


def read_changes(upper: int, copy: IO[bytes] | None) -> FolderChanges:
    """Return what was changed in the caches; `copy` gets their tar, as engines write it.

    `upper` is a descriptor of the overlay's upper folder. Raises OSError.
    """
    with _open_caches(os.dup(upper)) as (folder, changes):
        if folder is None:
            tarfile.open(fileobj=copy, mode="w").close() if copy else None
            return changes
        hidden, emptied = _find_hidden(folder)
        return FolderChanges(
            states=_read_folder(folder, copy),
            hidden=changes.hidden | hidden,
            emptied=changes.emptied | emptied,
        )


def list_changed_paths(upper: int) -> Iterator[str]:
    """Yield the absolute path of everything that was written, in any order; raises OSError."""
    for path, folders, files, descriptor in os.fwalk(".", dir_fd=upper):
        for name in (*folders, *files):
            status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            if not _is_whiteout(status):
                yield _show_path(f"{path}/{name}")


def measure_caches(upper: int) -> int:
    """Return the bytes of all files that are written to the caches, also while the container runs."""
    size = 0
    with contextlib.suppress(OSError), _open_caches(os.dup(upper)) as (folder, _):
        if folder is not None:
            for _, _, files, descriptor in os.fwalk(".", dir_fd=folder):
                for name in files:
                    with contextlib.suppress(FileNotFoundError):
                        size += os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_size
    return size


@contextlib.contextmanager
def _open_caches(root: int) -> Iterator[tuple[int | None, FolderChanges]]:
    """Yield a descriptor of the caches in the folder `root`, None without them, and what is hidden above.

    Closes `root`.
    """
    hidden, emptied, path = set(), set(), ""
    folder: int | None = root
    try:
        for name in ROOT.strip("/").split("/"):
            path = f"{path}/{name}"
            try:
                inner = os.open(name, INSIDE, dir_fd=root)
            except FileNotFoundError:
                folder = None
                break
            except NotADirectoryError:
                folder = None
                hidden.add(path)
                break
            os.close(root)
            folder = root = inner
            if _is_opaque(root):
                emptied.add(path)
        yield folder, FolderChanges(states={}, hidden=frozenset(hidden), emptied=frozenset(emptied))
    finally:
        os.close(root)


def _find_hidden(folder: int) -> tuple[set[str], set[str]]:
    """Return what is hidden and emptied in the caches' upper folder, and let this user read all of it."""
    hidden, emptied = set(), set()
    os.fchmod(folder, os.fstat(folder).st_mode | SEARCHABLE)
    for path, folders, files, descriptor in os.fwalk(".", dir_fd=folder):
        here = _show_path(f"{ROOT}/{path}")
        if _is_opaque(descriptor):
            emptied.add(here)
        for name in (*folders, *files):
            mode = os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode
            if not stat.S_ISDIR(mode):
                hidden.add(_show_path(f"{here}/{name}"))
            bits = SEARCHABLE if stat.S_ISDIR(mode) else READABLE if stat.S_ISREG(mode) else 0
            if mode & bits != bits:
                os.chmod(name, stat.S_IMODE(mode) | bits, dir_fd=descriptor)
    return hidden, emptied


def _read_folder(folder: int, copy: IO[bytes] | None) -> dict[str, FileState]:
    """Return the states of the caches, whose folder is open; `copy` gets their tar."""
    name = os.path.basename(ROOT)  # noqa: PTH119 - of a container
    with (
        tempfile.TemporaryFile(dir=get_disk_folder()) if copy is None else contextlib.nullcontext(copy) as to
    ):
        with tarfile.open(fileobj=to, mode="w", format=tarfile.PAX_FORMAT) as archive:

            def filter_member(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
                archive.members = []  # type: ignore[attr-defined]  # it keeps them all
                member.mtime = int(member.mtime)  # a fraction takes an extended header
                is_whiteout = member.ischr() and (member.devmajor, member.devminor) == (0, 0)
                return None if is_whiteout else member

            archive.add(f"/proc/self/fd/{folder}/.", name, filter=filter_member)
        to.seek(0)
        return read_states(to, ROOT)


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _is_opaque(folder: int) -> bool:
    try:
        return os.getxattr(folder, OPAQUE) == b"y"
    except OSError:  # it has no such attribute
        return False


def _show_path(path: str) -> str:
    """Return an absolute path without dots, as the names in a tar are."""
    return f"/{os.path.normpath(path).lstrip('/')}"
