"""Files that are written whole or not at all, and whether one has changed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The file can be written but not replaced: its folder is not writable, or it is a mount of its own.
IN_PLACE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY}
STREAMS = ("/dev/", "/proc/")  # such as /dev/stdout, which may lead to a file that a shell has open


def get_cache_folder(name: str) -> Path | None:
    """Return the folder `name` in the cache (XDG Base Directory Specification); None if there is no home."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        base = configured if configured.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "imagematrix" / name


def require_private(folder: Path) -> Path:
    """Return `folder` if only this user can access it, as for a cache; raise OSError otherwise."""
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "others can access this folder", str(folder))
    return folder


def make_private(folder: Path) -> Path:
    """Return `require_private(folder)`, creating it if needed; raise OSError."""
    if not folder.exists():
        parent = next(parent for parent in folder.parents if parent.exists())
        if parent.stat().st_uid != os.geteuid():  # under sudo, HOME may belong to another user
            raise PermissionError(errno.EPERM, "this folder belongs to another user", str(parent))
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return require_private(folder)


@contextlib.contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Name the file `path` in errors that name none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def replace_file(
    path: Path,
    content: bytes,
    mode: int | None = None,
    check: Callable[[Path], None] = lambda _: None,
    suffix: str = "",
) -> None:
    """Replace the file `path`, or create it, so that readers and a power failure see all of it or none.

    `check` gets the draft beside it, whose name ends in `suffix`. Without a `mode`, a file that is replaced
    keeps its mode, and its owner and group if this user may give them; to a new one, the umask applies.
    Raises OSError, and the errors of `check`; the file is then unchanged.
    """
    replaced = _find_replaced(path) if mode is None else None
    # The draft's name ends in the file's name: that is how build contexts ignore the draft of a lock file.
    draft = path.with_name(f".{os.urandom(6).hex()}.{path.name}{suffix}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with contextlib.ExitStack() as undo:
        undo.callback(draft.unlink, missing_ok=True)
        with os.fdopen(descriptor, "wb") as file:
            if replaced:
                os.fchmod(descriptor, replaced.st_mode & 0o777)
                _give_owner(descriptor, replaced)
            elif mode is not None:
                os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        check(draft)
        draft.replace(path)
        undo.pop_all()


def _find_replaced(path: Path) -> os.stat_result | None:
    """Return the status of the file whose mode and owner its replacement keeps; None if there is none.

    A link has none of its own. In a folder that everybody can write, another user may have put the file
    there so as to own what replaces it.
    """
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        is_shared = path.parent.stat().st_mode & stat.S_IWOTH
        if stat.S_ISREG(status.st_mode) and (status.st_uid == os.geteuid() or not is_shared):
            return status
    return None


def _give_owner(descriptor: int, status: os.stat_result) -> None:
    """Give an open file the owner and group in `status`, or the group, as far as this user may."""
    for owner in (status.st_uid, -1):
        with contextlib.suppress(OSError):
            os.fchown(descriptor, owner, status.st_gid)
            return


def write_output(path: Path, content: bytes) -> None:
    """Write the file that a user named for output: all or nothing if it can be replaced.

    Links are followed. A pipe or another special file is written to, not replaced. Raises OSError.
    """
    if str(path.absolute()).startswith(STREAMS) or (path.exists() and not path.is_file()):
        path.write_bytes(content)
        return
    target = Path(os.path.realpath(path))  # also of a link to itself
    try:
        replace_file(target, content)
    except OSError as error:
        if error.errno not in IN_PLACE:
            raise
        target.write_bytes(content)


def read_stamp(path: Path) -> tuple[int, ...] | None:
    """Return what differs once the file was written or made anew; None if there is none.

    An inode alone may be used again, and clocks of file systems are coarse.
    """
    try:
        return make_stamp(path.stat())
    except OSError:
        return None


def make_stamp(status: os.stat_result) -> tuple[int, ...]:
    """Return what `read_stamp` returns, of a file with this status."""
    return status.st_dev, status.st_ino, status.st_ctime_ns, status.st_size
