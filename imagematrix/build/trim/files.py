"""Listing the files under paths, and replacing files atomically."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from imagematrix.common.files import make_stamp, name_file_in_errors, read_stamp
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import IO

PREFIX = ".imagematrix-trim-"  # of temporary files, which are locked while they are written


@dataclass(frozen=True, slots=True)
class PathPair:
    """A path of a file, and the path of the result; both are the same if the file is replaced."""

    source: Path
    target: Path


@dataclass(frozen=True, slots=True)
class FileListing:
    """The contents of some paths: regular files, each with all its names; symbolic links; folders.

    `output` is the folder for copies, None if the files themselves are replaced.
    """

    output: Path | None
    files: tuple[tuple[PathPair, ...], ...]
    links: tuple[PathPair, ...]
    folders: tuple[PathPair, ...]

    def create(self) -> None:
        """Create the folders and the links of the copies."""
        if self.output is None:
            return
        self.output.mkdir(parents=True, exist_ok=True)
        for folder in self.folders:
            folder.target.mkdir()
        for link in self.links:
            link.target.symlink_to(link.source.readlink())

    def finish(self) -> None:
        """Set the modes and times of the copies' folders. Call this after all files are written."""
        for folder in reversed(self.folders if self.output else ()):
            shutil.copystat(folder.source, folder.target)


def list_files(paths: Sequence[Path], output: Path | None) -> FileListing:
    """Return the contents of `paths`; results go to the folder `output`, or replace the files.

    Links in folders are not followed. Raises UsageError if a path does not exist, or a target already does.
    """
    files: dict[tuple[int, int], dict[Path, PathPair]] = {}
    links: list[PathPair] = []
    folders: list[PathPair] = []
    sources: dict[Path, Path] = {}  # by target
    for path in paths:
        source = _resolve_link(path)
        target = output / path.absolute().name if output else source
        if output and os.path.lexists(target):
            raise UsageError(f"{target} already exists", remedy="remove it, or give another --output")
        if sources.get(target) == source:
            continue
        if target in sources:
            raise UsageError(
                f"{sources[target]} and {source} would both become {target}",
                remedy="trim each of them with its own --output",
            )
        sources[target] = source
        for name in _walk_folder(source, target):
            status = name.source.lstat()
            if stat.S_ISDIR(status.st_mode):
                folders.append(name)
            elif stat.S_ISLNK(status.st_mode):
                links.append(name)
            elif stat.S_ISREG(status.st_mode):
                files.setdefault((status.st_dev, status.st_ino), {})[name.target.absolute()] = name
            elif output:
                raise UsageError(f"{name.source} cannot be copied: it is not a file, a folder or a link")
    return FileListing(
        output, tuple(tuple(names.values()) for names in files.values()), tuple(links), tuple(folders)
    )


def replace_files(
    names: Sequence[PathPair], status: os.stat_result, write: Callable[[IO[bytes]], object]
) -> None:
    """Write a file to the targets of `names`, with the mode and the times of its source.

    `status` is the status of the source when it was read; raises UsageError if the source has changed since.
    In place, the owner is kept, too.
    """
    first, *other_names = names
    if first.source == first.target:
        for folder in {name.target.parent for name in names}:
            _remove_stale_files(folder)
    with name_file_in_errors(first.target), _open_temporary(first.target.parent) as (file, temporary):
        write(file)
        file.truncate(file.tell())
        file.flush()
        new_status = os.fstat(file.fileno())
        owner, new_owner = (status.st_uid, status.st_gid), (new_status.st_uid, new_status.st_gid)
        if first.source == first.target and owner != new_owner:
            os.fchown(file.fileno(), status.st_uid, status.st_gid)
        shutil.copystat(first.source, temporary)
        os.fsync(file.fileno())
        # As late as possible: a change after this check would be lost.
        if read_stamp(first.source) != make_stamp(status):
            raise UsageError(f"{first.source} changed while it was read", remedy="run the command again")
        for other_name in other_names:
            with _open_temporary(other_name.target.parent) as (_, link):
                link.unlink()
                link.hardlink_to(temporary)
                link.replace(other_name.target)
        temporary.replace(first.target)


@contextlib.contextmanager
def _open_temporary(folder: Path) -> Iterator[tuple[IO[bytes], Path]]:
    with contextlib.ExitStack() as stack:
        while True:
            file = stack.enter_context(tempfile.NamedTemporaryFile(prefix=PREFIX, dir=folder, delete=False))
            with contextlib.suppress(
                OSError
            ):  # a file system without locks: `_remove_stale_files` removes nothing
                fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:  # 0 if another process removed it as stale before the lock
                break
        temporary = Path(file.name)
        try:
            yield file, temporary
        finally:
            temporary.unlink(missing_ok=True)


def _remove_stale_files(folder: Path) -> None:
    """Remove temporary files of killed processes, which are no longer locked."""
    with os.scandir(folder) as entries:
        paths = [Path(entry.path) for entry in entries if entry.name.startswith(PREFIX) and entry.is_file()]
    for path in paths:
        # An error means that its process still holds the lock, or has just removed it.
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _resolve_link(path: Path) -> Path:
    """Return `path`, or its target if it is a link; raise UsageError if that does not exist."""
    try:
        resolved = path.resolve(strict=True)
        return resolved if path.is_symlink() else path
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "symbolic links form a loop"
        raise UsageError(f"{path}: {reason}") from error


def _walk_folder(source: Path, target: Path) -> Iterator[PathPair]:
    """Yield a file, or a folder and its contents, sorted by name."""
    waiting = [(PathPair(source, target), source.is_dir())]
    while waiting:
        name, folder = waiting.pop()
        yield name
        if not folder:
            continue
        with os.scandir(name.source) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name, reverse=True)
        for entry in ordered:
            inner = entry.is_dir(follow_symlinks=False)
            if inner or not entry.name.startswith(PREFIX):  # drafts of another run are none of the files
                waiting.append((PathPair(name.source / entry.name, name.target / entry.name), inner))
