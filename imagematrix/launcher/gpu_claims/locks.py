"""Named locks shared by all users of a node; the kernel releases a lock when its last holder ends.

A lock is an flock(2) on a file in one folder. It belongs to the open file description, and so to every
process that inherits the descriptor: it survives exec and needs no clean-up. Lock files are never removed
while another process might lock them, or two processes could hold the lock of one name.

If the engine's socket belongs to a group when the folder is made, the folder belongs to it too, and only
members of the group can hold locks. Otherwise any user may write to the folder, as on a node where some start
containers without a daemon. Its contents are not trusted: links are not followed,
only regular files are opened, and the holder of a lock is the process that the kernel reports.
"""
# Names are opened relative to the checked folder, which pathlib cannot do.
# ruff: noqa: PTH102, PTH103, PTH106, PTH112, PTH120, PTH208

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time

from imagematrix.common.record import Record
from imagematrix.common.text import quote_word
from imagematrix.common.user_folder import find_runtime_folder
from imagematrix.errors import GpusBusyError, ProbeError
from imagematrix.launcher.gpu_claims.processes import describe_process, read_proc_lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from typing import Self

SHARED = "/run/lock/imagematrix"
NAMED = "IMAGEMATRIX_LOCKS"  # the variable that names another folder
WORLD_MODE = 0o1777  # any user may write, and remove only their own files
GROUP_MODE = 0o3770  # the same for a group, which the files inherit
MUTEX = "turn"  # the lock under which one launch at a time surveys and claims GPUs
MUTEX_S = 60.0  # a survey of the GPUs takes about 0.1 s, and 20 s with a faulty driver
RETRY_S = 0.02
SETTLE_S = 0.5  # from the creation of the folder to its mode
TEXT_LIMIT = 64 * 1024  # bytes


def locate_locks(machine: str | None = None) -> str:
    """Return the folder of this node's locks, or of those for the GPUs of another machine.

    It is the one that IMAGEMATRIX_LOCKS names, or a folder in /run/lock. If that folder is missing and this
    user may not create it, it is a folder in XDG_RUNTIME_DIR: only this user's processes share these locks.
    """
    if machine is not None:
        return f"{locate_locks()}-{re.sub('[^A-Za-z0-9.-]', '_', machine)}"
    if named := os.environ.get(NAMED):
        return named
    if os.path.lexists(SHARED) or os.access(os.path.dirname(SHARED), os.W_OK):
        return SHARED
    runtime = find_runtime_folder()
    return f"{runtime}/imagematrix" if runtime else SHARED


class LockFile(Record):
    """The text in a lock file, its owner, the seconds since it was touched, and whether its lock is held."""

    text: str
    owner: int
    quiet_s: float
    is_held: bool


class Locks:
    """The locks in one folder, which is created if missing; close it after use.

    `group` is the id of the group whose members may start containers, None if there is none or it is unknown.
    """

    def __init__(self, path: str, group: int | None = None) -> None:
        self.path = path
        self._folder = _open_folder(path, group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._folder)

    def take(self, *names: str, shared: bool = False) -> tuple[int, ...] | None:
        """Return descriptors that hold the locks of all `names`, or None if another process holds one.

        Processes that take a lock as `shared` hold it together.
        """
        descriptors: list[int] = []
        with contextlib.ExitStack() as undo:
            undo.callback(release_locks, descriptors)
            for name in names:
                with self._convert_errors(name):
                    try:
                        descriptors.append(self._open_existing(name))
                    except FileNotFoundError:
                        self.create(name)
                        descriptors.append(self._open_existing(name))
                if not _try_lock(descriptors[-1], fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
                    return None
            undo.pop_all()
        return tuple(descriptors)

    @contextlib.contextmanager
    def hold_mutex(self, wait_s: float | None = None) -> Iterator[None]:
        """Hold the lock under which GPUs are surveyed and claimed.

        Raises GpusBusyError after `wait_s` seconds, by default once one process has held it for MUTEX_S.
        """
        descriptors = self._take_mutex(wait_s)
        try:
            yield
        finally:
            release_locks(descriptors)

    def find_holders(self) -> dict[str, int]:
        """Return the process id of the holder by lock, for the locks whose holder this process can see."""
        pids = _read_kernel_locks()
        holders = {}
        for name in self.list_names():
            with contextlib.suppress(OSError):  # removed meanwhile
                file = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
                inode = (os.major(file.st_dev), os.minor(file.st_dev), file.st_ino)
                if inode in pids:
                    holders[name] = pids[inode]
        return holders

    def list_names(self) -> list[str]:
        """Return the names of all lock files, held or not."""
        return sorted(os.listdir(self._folder))

    def create(self, name: str) -> None:
        """Create an unlocked lock file; an existing one stays as it is."""
        with contextlib.suppress(FileExistsError):
            os.close(self._create_file(name, "", locked=False))

    def hold(self, name: str, text: str) -> tuple[int, ...]:
        """Create a lock file with `text` in it and return a descriptor that holds its lock.

        The file appears with its lock held: if the lock is free, the holder has ended.
        """
        with self._convert_errors(name):
            return (self._create_file(name, text, locked=True),)

    def write(self, name: str, text: str) -> None:
        """Create an unlocked file with `text` in it."""
        with self._convert_errors(name):
            os.close(self._create_file(name, text, locked=False))

    def read_text(self, name: str, owners: Collection[int]) -> str | None:
        """Return the text of a file if it belongs to one of these users, else None."""
        file = self.inspect_lock(name)
        return file.text if file and file.owner in owners else None

    def read_held_text(self, name: str) -> str | None:
        """Return the text in a lock file whose lock is held, else None."""
        file = self.inspect_lock(name)
        return file.text if file and file.is_held else None

    def inspect_lock(self, name: str) -> LockFile | None:
        """Return a lock file, None if there is none."""
        try:
            descriptor = self._open_existing(name)
        except (OSError, ProbeError):  # removed, or not a regular file
            return None
        try:
            # A shared lock, so that two readers do not mistake each other for the holder.
            is_held = not _try_lock(descriptor, fcntl.LOCK_SH)
            status = os.fstat(descriptor)
            return LockFile(
                text=os.read(descriptor, TEXT_LIMIT).decode("utf-8", "replace"),
                owner=status.st_uid,
                quiet_s=abs(time.time() - status.st_mtime),
                is_held=is_held,
            )
        finally:
            os.close(descriptor)

    def measure_age(self, name: str) -> float:
        """Return the seconds since a lock file was touched; infinite if it is gone."""
        try:
            touched = os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_mtime
        except OSError:
            return float("inf")
        return abs(time.time() - touched)  # a time in the future was set by hand and proves nothing

    def remove(self, name: str) -> None:
        """Remove a lock file, if this user may."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._folder)

    def require_writable(self) -> None:
        """Raise ProbeError if no file can be written: a launch then cannot wait, or record what it holds."""
        name = f".check-{os.urandom(8).hex()}"
        self.write(name, "check")
        self.remove(name)

    def _take_mutex(self, wait_s: float | None) -> tuple[int, ...]:
        if descriptors := self.take(MUTEX):
            return descriptors
        while True:
            holder = self.find_holders().get(MUTEX)
            deadline = time.monotonic() + (MUTEX_S if wait_s is None else wait_s)
            while True:
                if descriptors := self.take(MUTEX):
                    return descriptors
                if time.monotonic() >= deadline:
                    break
                time.sleep(RETRY_S)
            last = self.find_holders().get(MUTEX)
            # That others have the mutex briefly, one after another, is no reason to give up.
            if last == holder or wait_s is not None:
                by = describe_process(last) if last else "a process that is not visible from here"
                patience_s = round(MUTEX_S if wait_s is None else wait_s, 2)
                raise GpusBusyError(
                    f"another launch has been choosing its GPUs for {patience_s:g} seconds: {by}",
                    remedy="check why that process waits; if it hangs, end it",
                )

    @contextlib.contextmanager
    def _convert_errors(self, name: str) -> Iterator[None]:
        """Raise ProbeError in place of OSError."""
        try:
            yield
        except OSError as error:
            raise _make_unusable_error(self.path, error, name) from error

    def _create_file(self, name: str, text: str, *, locked: bool) -> int:
        # The file appears complete, and readable for all users whatever the umask.
        draft = f".{os.urandom(8).hex()}"
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        descriptor = os.open(draft, flags, 0o600, dir_fd=self._folder)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            try:
                os.write(descriptor, text.encode())
                os.fchmod(descriptor, 0o444)
                if locked:
                    _try_lock(descriptor)
                os.link(draft, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            finally:
                os.unlink(draft, dir_fd=self._folder)
            undo.pop_all()
        return descriptor

    def _open_existing(self, name: str) -> int:
        # These flags prevent blocking on a pipe, or following a link, that another user created.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, dir_fd=self._folder)
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
        except OSError as error:
            if error.errno != errno.ELOOP:  # of a link
                raise
        raise ProbeError(f"{self.path}/{name} is not a regular file", remedy="remove it")


def release_locks(descriptors: Iterable[int]) -> None:
    """Release locks."""
    for descriptor in descriptors:
        os.close(descriptor)


def inherit_locks(descriptors: Iterable[int]) -> None:
    """Keep locks across the exec of another program in this process."""
    for descriptor in descriptors:
        os.set_inheritable(descriptor, True)


def _open_folder(path: str, group: int | None) -> int:
    with contextlib.ExitStack() as undo:
        try:
            if path == SHARED:
                os.makedirs(os.path.dirname(SHARED), exist_ok=True)  # minimal systems lack /run/lock
            is_new = False
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
                is_new = True
                undo.callback(_remove_folder, path)  # nobody else could use it
            descriptor = _open_with_retries(path)
            undo.callback(os.close, descriptor)
            if (
                is_new
            ):  # the mode of another one is its owner's choice: not only members of a group may need it
                _set_mode(descriptor, group)
        except OSError as error:
            raise _make_unusable_error(path, error) from error
        _require_safe(path, os.fstat(descriptor), group)
        undo.pop_all()
    return descriptor


def _remove_folder(path: str) -> None:
    with contextlib.suppress(OSError):  # another process of this user may have a lock in it by now
        os.rmdir(path)


def _open_with_retries(path: str) -> int:
    """Open the folder, with retries: another user's process may have created it and not set its mode yet."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except PermissionError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(RETRY_S)


def _set_mode(descriptor: int, group: int | None) -> None:
    """Give the folder to the group, or to all users, whatever the umask."""
    if group is not None:
        try:
            os.fchown(descriptor, -1, group)
        except PermissionError as error:
            why = "it has to belong to the group that may start containers, and this user is not in it"
            raise PermissionError(error.errno, why) from error
    os.fchmod(descriptor, WORLD_MODE if group is None else GROUP_MODE)


def _require_safe(path: str, folder: os.stat_result, group: int | None) -> None:
    """Raise ProbeError if an unprivileged user could break or block the locks."""
    if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        raise ProbeError(
            f"unsafe permissions of {path}: any user can remove the locks of others",
            remedy=f"chmod {WORLD_MODE:o} {path}",
        )
    if group is None or folder.st_uid in (0, os.geteuid()):
        return
    import grp
    import pwd

    try:
        owner = pwd.getpwuid(folder.st_uid)
        name, is_member = owner.pw_name, group == owner.pw_gid or owner.pw_name in grp.getgrgid(group).gr_mem
    except KeyError:
        name, is_member = str(folder.st_uid), False
    if not is_member:
        raise ProbeError(
            f"the folder of the GPU locks, {path}, is owned by user {name}, who may not start containers",
            remedy=_format_opening(path),
        )


def _make_unusable_error(path: str, error: OSError, name: str | None = None) -> ProbeError:
    """Return the error for a folder, or for the file `name` in it."""
    # No remedy removes the folder, which has the GPUs of running tasks.
    create = (
        f"`install -d -m {GROUP_MODE:o} -g docker {SHARED}`, or `mkdir -m {WORLD_MODE:o} {SHARED}` where no "
        "group may start containers"
    )
    remedy = f"as root, run {create}"
    if os.path.isdir(path) and error.errno in (errno.EACCES, errno.EPERM):
        remedy = f"{_format_opening(path)}: users of all engines may have to write there"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"free space there, or inodes: see `df {quote_word(path)}` and `df -i {quote_word(path)}`"
    elif error.errno == errno.EROFS:
        remedy = f"remount it read-write: `findmnt -T {quote_word(path)}` shows what is mounted"
    elif error.errno in (errno.ENOTDIR, errno.ELOOP):
        remedy = f"it is not a folder: as root, move it away and run {create}"
    where = path if name is None else f"{path}/{name}"
    return ProbeError(f"cannot use the GPU locks: {where}: {error.strerror}", remedy=remedy)


def _format_opening(path: str) -> str:
    """Return the remedy for a folder to which users have to write whatever their engines are."""
    return f"as root, run `chown root:root {quote_word(path)}` and `chmod {WORLD_MODE:o} {quote_word(path)}`"


def _try_lock(descriptor: int, mode: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_kernel_locks() -> dict[tuple[int, int, int], int]:
    """Return the process id of each flock's holder by device and inode; see proc_locks(5).

    Holders outside this PID namespace are left out. It takes 7 to 15 ms on a kernel 6.18: the kernel stops
    all changes of locks meanwhile, and waits until every processor has noticed (locks_start in fs/locks.c).
    """
    pids = {}
    for words in map(str.split, read_proc_lines("/proc/locks")):
        # The line of a blocked request has one word more: "->".
        if len(words) == 8 and words[1] == "FLOCK" and words[4].isdecimal() and words[4] != "0":  # noqa: PLR2004
            major, minor, inode = words[5].split(":")
            pids[int(major, 16), int(minor, 16), int(inode)] = int(words[4])
    return pids
