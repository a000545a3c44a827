"""The temporary folder of a build, which is removed with the build however that ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["disk", "room", "scratch"]

PREFIX = "imagematrix-build-"


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield a new folder under TMPDIR or /var/tmp, and remove it at the end.

    Folders of killed builds are removed first. A running build holds a lock on its folder, which the kernel
    releases with the process.
    """
    parent = disk()
    for leftover in parent.glob(f"{PREFIX}*"):
        with _locked(leftover) as dead:
            if dead:
                shutil.rmtree(leftover, ignore_errors=True)
    # It gets the name that other builds look for once it is locked.
    unlocked = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))
    with _locked(unlocked):
        folder = unlocked.rename(parent / unlocked.name[1:])
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def room(folder: Path) -> str:
    """Return the remedy for a full disk of a build's folder."""
    return f"free disk space in {folder.parent} (or set TMPDIR) and in the engine"


def disk() -> Path:
    """Return the folder for files that may be too large for memory: TMPDIR, or /var/tmp."""
    # Layers can have gigabytes, and /tmp is in memory on many systems.
    for path in (os.environ.get("TMPDIR"), "/var/tmp"):  # noqa: S108 - the names created there are random and new
        if path and os.access(path, os.W_OK | os.X_OK):
            return Path(path).absolute()
    return Path(tempfile.gettempdir())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock one of our folders; yield whether no other process holds the lock, if the file system can tell."""
    with contextlib.ExitStack() as stack:
        try:
            number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, number)
            acquired = os.fstat(number).st_uid == os.getuid()
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            acquired = False
        yield acquired
