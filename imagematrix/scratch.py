"""A folder for what a build writes to disk, which goes with the build however that ends."""

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
    """Yield a new folder under TMPDIR or /var/tmp, and remove it in the end.

    What builds have left there that were killed is removed first. A lock on its folder tells a build that
    lives: the kernel drops it with the process.
    """
    place = disk()
    for left in place.glob(f"{PREFIX}*"):
        with _locked(left) as dead:
            if dead:
                shutil.rmtree(left, ignore_errors=True)
    # It gets the name that others look for when it has its lock.
    unlocked = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=place))
    with _locked(unlocked):
        folder = unlocked.rename(place / unlocked.name[1:])
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def room(folder: Path) -> str:
    """Return what to do where the disk of a build's folder is full."""
    return f"a build takes room in {folder.parent} (or where TMPDIR says) and in the engine"


def disk() -> Path:
    """Return the folder for what may be too large for memory: TMPDIR, or /var/tmp."""
    # Layers may have gigabytes, and /tmp is in memory on many systems.
    for path in (os.environ.get("TMPDIR"), "/var/tmp"):  # noqa: S108 - names there are made up and new
        if path and os.access(path, os.W_OK | os.X_OK):
            return Path(path).absolute()
    return Path(tempfile.gettempdir())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder of ours; yield whether nobody else has it locked, as far as its file system can tell."""
    with contextlib.ExitStack() as stack:
        try:
            number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, number)
            own = os.fstat(number).st_uid == os.getuid()
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            own = False
        yield own
