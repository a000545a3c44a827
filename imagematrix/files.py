"""Files that are written whole or not at all, and whether one has changed."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["named", "replace", "stamp", "stamp_of", "write"]

# The file can be written but not replaced: its folder is not writable, or it is a mount of its own.
IN_PLACE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY}
STREAMS = ("/dev/", "/proc/")  # such as /dev/stdout, which may lead to a file that a shell has open


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Name the file `path` in errors that name none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def replace(
    path: Path,
    content: bytes,
    mode: int | None = None,
    check: Callable[[Path], None] = lambda _: None,
    suffix: str = "",
) -> None:
    """Replace the file `path`, or create it, so that readers and a power failure see all of it or none.

    `check` gets the draft beside it, whose name ends in `suffix`. Without a `mode`, the umask applies. Raises
    OSError, and the errors of `check`; the file is then unchanged.
    """
    # The draft's name ends in the file's name: that is how build contexts ignore the draft of a lock file.
    draft = path.with_name(f".{os.urandom(6).hex()}.{path.name}{suffix}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with contextlib.ExitStack() as undo:
        undo.callback(draft.unlink, missing_ok=True)
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        check(draft)
        draft.replace(path)
        undo.pop_all()


def write(path: Path, content: bytes) -> None:
    """Write the file that a user named for output: all or nothing if it can be replaced.

    Links are followed. A pipe or another special file is written to, not replaced. Raises OSError.
    """
    if str(path.absolute()).startswith(STREAMS) or (path.exists() and not path.is_file()):
        path.write_bytes(content)
        return
    target = Path(os.path.realpath(path))  # also of a link to itself
    try:
        replace(target, content, target.stat().st_mode & 0o7777 if target.exists() else None)
    except OSError as error:
        if error.errno not in IN_PLACE:
            raise
        target.write_bytes(content)


def stamp(path: Path) -> tuple[int, ...] | None:
    """Return what differs once the file was written or made anew; None if there is none.

    An inode alone may be used again, and clocks of file systems are coarse.
    """
    try:
        return stamp_of(path.stat())
    except OSError:
        return None


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """Return what `stamp` returns, of a file with this status."""
    return status.st_dev, status.st_ino, status.st_ctime_ns, status.st_size
