"""What a container changed, from the upper folder of its overlay; see overlayfs.rst of the kernel.

The folder is read after the last process that could change it has ended, but for the size of its files. No
link in it is followed: each leads somewhere in the container. The program is root there and may take from
folders the modes that an ordinary user needs to read them; they get these modes back.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from imagematrix.common.temp_folder import get_disk_folder
from imagematrix.errors import AuditError
from imagematrix.images.oci.layer_entries import DEEPEST
from imagematrix.images.warm.tools import ROOT
from imagematrix.launcher.warm_up.folder_states import FileState, read_states
from imagematrix.launcher.warm_up.program_run import list_parents

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import IO

OPAQUE = "user.overlay.opaque"  # an attribute of a folder that hides the one of the same path below it
INSIDE = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READABLE, LISTABLE = 0o400, 0o500


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
            parents = [*list_parents(path)]
            return self.hidden.isdisjoint((path, *parents)) and self.emptied.isdisjoint(parents)

        return {**{path: state for path, state in before.items() if is_left(path)}, **self.states}


NO_CHANGES = FolderChanges(states={}, hidden=frozenset(), emptied=frozenset())


def read_caches(root: str) -> dict[str, FileState]:
    """Return the states of the caches in the folder `root` of an image's files, none if it has none."""
    with _open_caches(os.open(root, INSIDE)) as (folder, _):
        return {} if folder is None else _read_folder(folder, None)


def read_changes(upper: int, copy: IO[bytes] | None) -> FolderChanges:
    """Return what was changed in the caches; `copy` gets their tar, as engines write it.

    `upper` is a descriptor of the overlay's upper folder. Raises OSError, and AuditError for folders that are
    nested too deeply.
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
    """Yield the absolute path of everything that was written, in any order; raises OSError.

    What is in a folder that is nested more deeply than an image can have one is not named; the folder is.
    """
    for path, _, entries in _walk(upper, "", is_cut=True):
        for name, status in entries.items():
            if not _is_whiteout(status):
                yield f"{path}/{name}"


def measure_caches(upper: int) -> int:
    """Return the bytes of all files that are written to the caches, also while the container runs.

    Raises what read_changes does.
    """
    with _open_caches(os.dup(upper)) as (folder, _):
        walked = () if folder is None else _walk(folder, ROOT)
        return sum(
            status.st_size
            for _, _, entries in walked
            for status in entries.values()
            if not stat.S_ISDIR(status.st_mode)
        )


def open_folder(name: str, parent: int) -> int:
    """Return a descriptor of the folder in `parent`, which gets the modes that this user needs to list it.

    A program that runs may put a link in its place: what gets the modes is what was opened.
    """
    found = os.open(name, INSIDE | os.O_PATH, dir_fd=parent)
    try:
        if not os.access(".", os.R_OK | os.X_OK, dir_fd=found, effective_ids=True):
            Path(f"/proc/self/fd/{found}").chmod(stat.S_IMODE(os.fstat(found).st_mode) | LISTABLE)
        return os.open(".", INSIDE, dir_fd=found)
    finally:
        os.close(found)


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
                inner = open_folder(name, root)
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


def _walk(
    root: int, path: str, *, is_cut: bool = False
) -> Iterator[tuple[str, int, dict[str, os.stat_result]]]:
    """Yield each folder from `root` on, whose path is given: its path, a descriptor, what is in it by name.

    A folder comes before those in it. What a program that runs removes meanwhile is left out. A folder that
    is nested more deeply than an image can have one is left out with `is_cut`; else it raises AuditError.
    """
    top = path.count("/")
    left = [path]
    opened: list[int] = []  # the folders on the way
    try:
        while left:
            path = left.pop()
            level = path.count("/")
            if level > DEEPEST and is_cut:
                continue
            if level > DEEPEST:
                message = f"the path {path[:80]!r}… has more than {DEEPEST} levels"
                raise AuditError(message, remedy="let the program nest its folders less deeply")
            while len(opened) > level - top:
                os.close(opened.pop())
            name, parent = (path.rpartition("/")[2], opened[-1]) if opened else (".", root)
            try:
                opened.append(open_folder(name, parent))
            except (FileNotFoundError, NotADirectoryError):
                continue
            entries = dict(_list_entries(opened[-1]))
            yield path, opened[-1], entries
            left += [f"{path}/{name}" for name, status in entries.items() if stat.S_ISDIR(status.st_mode)]
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _list_entries(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            yield name, os.stat(name, dir_fd=folder, follow_symlinks=False)


def _find_hidden(folder: int) -> tuple[set[str], set[str]]:
    """Return what is hidden and emptied in the caches' upper folder, and let this user read its files."""
    hidden, emptied = set(), set()
    for path, descriptor, entries in _walk(folder, ROOT):
        if _is_opaque(descriptor):
            emptied.add(path)
        for name, status in entries.items():
            mode = status.st_mode
            if not stat.S_ISDIR(mode):
                hidden.add(f"{path}/{name}")
            if stat.S_ISREG(mode) and not mode & READABLE:
                os.chmod(name, stat.S_IMODE(mode) | READABLE, dir_fd=descriptor)
    return hidden, emptied


def _read_folder(folder: int, copy: IO[bytes] | None) -> dict[str, FileState]:
    """Return the states of the caches, whose folder is open; `copy` gets their tar."""
    name = os.path.basename(ROOT)  # noqa: PTH119 - of a container
    with (
        tempfile.TemporaryFile(dir=get_disk_folder()) if copy is None else contextlib.nullcontext(copy) as to
    ):
        with tarfile.open(fileobj=to, mode="w", format=tarfile.PAX_FORMAT) as archive:

            def strip_member(member: tarfile.TarInfo) -> tarfile.TarInfo:
                archive.members = []  # type: ignore[attr-defined]  # it keeps them all
                member.mtime = int(member.mtime)  # a fraction takes an extended header
                return member

            for path, descriptor, entries in _walk(folder, ROOT):
                place = f"{name}{path.removeprefix(ROOT)}"
                kept = [".", *(entry for entry, status in entries.items() if _is_file(status))]
                for entry in kept:
                    archive.add(
                        f"/proc/self/fd/{descriptor}/{entry}",
                        f"{place}/{entry}".removesuffix("/."),
                        recursive=False,
                        filter=strip_member,
                    )
        to.seek(0)
        return read_states(to, ROOT)


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _is_file(status: os.stat_result) -> bool:
    return not (stat.S_ISDIR(status.st_mode) or _is_whiteout(status))


def _is_opaque(folder: int) -> bool:
    try:
        return os.getxattr(folder, OPAQUE) == b"y"
    except OSError:  # it has no such attribute
        return False
