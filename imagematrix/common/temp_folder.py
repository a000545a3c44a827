"""The temporary folder of a build, which is removed however the build ends."""

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

PREFIX = "imagematrix-build-"
HELD = "imagematrix-held-"  # prefix of folders that are locked while a build has temporary names in an engine


@contextlib.contextmanager
def make_scratch_folder() -> Iterator[Path]:
    """Yield a new folder under TMPDIR or /var/tmp, and remove it at the end.

    Folders of killed builds are removed first.
    """
    for leftover in lock_abandoned(PREFIX):
        shutil.rmtree(leftover, ignore_errors=True)
    with make_owned_folder(PREFIX) as folder:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def make_owned_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield a new folder, locked within the context; the kernel releases the lock of a killed process.

    It is in `parent`, by default where large files belong (`get_disk_folder`).
    """
    # Only a locked folder gets a name that `lock_abandoned` looks for.
    unlocked = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent or get_disk_folder()))
    with _lock_folder(unlocked):
        yield unlocked.rename(unlocked.with_name(unlocked.name[1:]))


def lock_abandoned(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield this user's folders of processes that ended without removing them, each locked until the next."""
    for folder in (parent or get_disk_folder()).glob(f"{prefix}*"):
        with _lock_folder(folder) as acquired:
            if acquired:
                yield folder


def make_full_disk_remedy(folder: Path) -> str:
    """Return the remedy for a full disk of a build's folder."""
    return f"free disk space in {folder.parent} (or set TMPDIR) and in the engine"


def get_disk_folder() -> Path:
    """Return the folder for files that may be too large for memory: TMPDIR, or /var/tmp."""
    # Layers can have gigabytes, and /tmp is in memory on many systems.
    for path in (os.environ.get("TMPDIR"), "/var/tmp"):  # noqa: S108 - the names created there are random and new
        if path and os.access(path, os.W_OK | os.X_OK):
            return Path(path).absolute()
    return Path(tempfile.gettempdir())


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[bool]:
    """Lock one of our folders; yield whether no other process holds the lock, if the file system can tell."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, descriptor)
            acquired = os.fstat(descriptor).st_uid == os.getuid()
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            acquired = False
        yield acquired
