"""Entries of a layer of caches from a folder of this machine, in place of an engine's tar of it."""

import os
import stat
import tarfile
from pathlib import Path

from imagematrix.images.warm.tools import ROOT
from imagematrix.images.warm.warm_file import WarmFile


def read_folder(folder: Path) -> tuple[WarmFile, ...]:
    """Return everything in a folder of this machine that is ROOT in a container, except sockets.

    Raises OSError. Names of one file become hard links to the first of them.
    """
    files = [WarmFile(path=ROOT, kind=tarfile.DIRTYPE, mtime=int(folder.stat().st_mtime))]
    first_names: dict[tuple[int, int], str] = {}
    waiting = [ROOT]
    while waiting:
        path = waiting.pop()
        with os.scandir(folder / path.removeprefix(ROOT).lstrip("/")) as entries:
            described = [_describe_entry(entry, f"{path}/{entry.name}", first_names) for entry in entries]
        inner = [file for file in described if file]
        waiting += [file.path for file in inner if file.kind == tarfile.DIRTYPE]
        files += inner
    return tuple(files)


def _describe_entry(
    entry: os.DirEntry[str], path: str, first_names: dict[tuple[int, int], str]
) -> WarmFile | None:
    """Return an entry of a folder; None for a socket. `first_names` are paths of files by their inodes."""
    status = entry.stat(follow_symlinks=False)
    mtime = int(status.st_mtime)
    if stat.S_ISSOCK(status.st_mode):
        return None
    if stat.S_ISDIR(status.st_mode):
        return WarmFile(path=path, kind=tarfile.DIRTYPE, mtime=mtime)
    if stat.S_ISLNK(status.st_mode):
        return WarmFile(path=path, kind=tarfile.SYMTYPE, mtime=mtime, target=str(Path(entry.path).readlink()))
    if not stat.S_ISREG(status.st_mode):
        kind = tarfile.FIFOTYPE if stat.S_ISFIFO(status.st_mode) else tarfile.CHRTYPE
        return WarmFile(path=path, kind=kind)
    first = first_names.setdefault((status.st_dev, status.st_ino), path)
    if first != path:
        return WarmFile(path=path, kind=tarfile.LNKTYPE, target=first)
    return WarmFile(
        path=path,
        kind=tarfile.REGTYPE,
        mode=status.st_mode,
        mtime=mtime,
        size=status.st_size,
        open=lambda: Path(entry.path).open("rb"),
    )
