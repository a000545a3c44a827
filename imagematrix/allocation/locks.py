"""Locks by name that all users of a node share, each of which the kernel drops with its last holder.

A lock is flock(2)'s, on a file in one folder. It belongs to the open file, and so to every process that has
inherited the descriptor: it survives exec, and needs nobody to clean up. The files stay where they are: if
one were removed that another process is about to lock, two would hold the lock of that name.

Where only some users may start containers, because the engine's socket is a group's, the folder is for that
group: nobody else can hold a lock there. Otherwise everybody may write in it. Nothing in it is trusted: links
are not followed, nothing but plain files is opened, and who holds a lock is what the kernel says.
"""
# Names are opened relative to the folder that was checked, which pathlib cannot do.
# ruff: noqa: PTH102, PTH103, PTH120, PTH123, PTH208

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time

from imagematrix.allocation.processes import describe
from imagematrix.errors import GpusBusyError, ProbeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Self

__all__ = ["Locks", "folder", "inherit", "release"]

SHARED = "/run/lock/imagematrix"
ANYBODY = 0o1777  # all may write, and each may remove only what is theirs
MEMBERS = 0o3770  # the same for a group, whose the files are
TURN = "turn"
TURN_S = 60.0  # to look who uses the GPUs takes about a tenth of a second, 20 with a sick driver
RETRY_S = 0.02
TEXT_LIMIT = 64 * 1024  # bytes


def folder() -> str:
    """Return where the locks of this node are.

    That is IMAGEMATRIX_LOCKS, or a folder in /run/lock. Where there is none and this user may not make it,
    it is one in XDG_RUNTIME_DIR, and then the locks are between this user's own processes.
    """
    own = os.environ.get("XDG_RUNTIME_DIR")
    if named := os.environ.get("IMAGEMATRIX_LOCKS"):
        return named
    if own and not os.path.lexists(SHARED) and not os.access(os.path.dirname(SHARED), os.W_OK):
        return f"{own}/imagematrix"
    return SHARED


class Locks:
    """The locks in one folder, which is made where it is missing; close it after use.

    `group` is the number of the group whose members may start containers, None where nobody knows of such.
    """

    def __init__(self, path: str, group: int | None = None) -> None:
        self.path = path
        self._folder = _opened(path, group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._folder)

    def take(self, *names: str) -> tuple[int, ...] | None:
        """Return descriptors that hold the locks of all of these names, or None where another has one."""
        taken: list[int] = []
        with contextlib.ExitStack() as undo:
            undo.callback(release, taken)
            for name in names:
                taken.append(self._open(name))
                if not _locked(taken[-1]):
                    return None
            undo.pop_all()
        return tuple(taken)

    @contextlib.contextmanager
    def turn(self, wait_s: float | None = None) -> Iterator[None]:
        """Hold the lock under which GPUs are looked at and taken; raise GpusBusyError if nobody lets go.

        That is after `wait_s` seconds, by default when one process has held it for TURN_S.
        """
        taken = self._in_turn(wait_s)
        try:
            yield
        finally:
            release(taken)

    def holders(self) -> dict[str, int]:
        """Return the process that took each lock that is held, as far as this one may know."""
        locked = _kernel_locks()
        found = {}
        for name in self.names():
            with contextlib.suppress(OSError):  # gone meanwhile
                file = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
                place = (os.major(file.st_dev), os.minor(file.st_dev), file.st_ino)
                if place in locked:
                    found[name] = locked[place]
        return found

    def names(self) -> list[str]:
        """Return the names there are, held or not."""
        return sorted(os.listdir(self._folder))

    def create(self, name: str) -> None:
        """Make the file of a name, which nobody holds; one that is there stays as it is."""
        with contextlib.suppress(FileExistsError):
            os.close(self._made(name, "", held=False))

    def hold(self, name: str, text: str) -> tuple[int, ...]:
        """Make the file of a new name, with a text in it, and return a descriptor that holds its lock.

        Nobody finds it without the lock, so that a name made here whose lock is free is one of the past.
        """
        try:
            return (self._made(name, text, held=True),)
        except OSError as error:
            raise _unusable(f"{self.path}/{name}", error) from error

    def text_if_held(self, name: str) -> str | None:
        """Return the text in the file of a name whose lock is held, else None."""
        try:
            descriptor = self._existing(name)
        except (OSError, ProbeError):  # gone, or something that is no lock of ours
            return None
        try:
            # Shared, so that two who look at the same time do not take each other for the holder.
            if _locked(descriptor, fcntl.LOCK_SH):
                return None
            return os.read(descriptor, TEXT_LIMIT).decode("utf-8", "replace")
        finally:
            os.close(descriptor)

    def age(self, name: str) -> float:
        """Return for how many seconds nobody has touched the file of a name; endless where it is gone."""
        try:
            touched = os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_mtime
        except OSError:
            return float("inf")
        return abs(time.time() - touched)  # who sets a time to come has not touched it, either

    def remove(self, name: str) -> None:
        """Remove the file of a name, if it is this user's to remove."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._folder)

    def _in_turn(self, wait_s: float | None) -> tuple[int, ...]:
        while True:
            holder = self.holders().get(TURN)
            deadline = time.monotonic() + (TURN_S if wait_s is None else wait_s)
            while True:
                if taken := self.take(TURN):
                    return taken
                if time.monotonic() >= deadline:
                    break
                time.sleep(RETRY_S)
            last = self.holders().get(TURN)
            # Many that are quick are no reason to give up before the time.
            if last == holder or wait_s is not None:
                by = describe(last) if last else "one that this process cannot look at"
                raise GpusBusyError(
                    f"another launch has been choosing its GPUs for {TURN_S if wait_s is None else wait_s:g} "
                    f"seconds: {by}",
                    remedy="see what it is waiting for, and end it if it is stuck",
                )

    def _open(self, name: str) -> int:
        try:
            try:
                return self._existing(name)
            except FileNotFoundError:
                self.create(name)
                return self._existing(name)
        except OSError as error:
            raise _unusable(f"{self.path}/{name}", error) from error

    def _made(self, name: str, text: str, *, held: bool) -> int:
        # It appears whole, and for all users to read, whatever the umask.
        draft = f".{os.urandom(8).hex()}"
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        descriptor = os.open(draft, flags, 0o600, dir_fd=self._folder)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            try:
                os.write(descriptor, text.encode())
                os.fchmod(descriptor, 0o444)
                if held:
                    _locked(descriptor)
                os.link(draft, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            finally:
                os.unlink(draft, dir_fd=self._folder)
            undo.pop_all()
        return descriptor

    def _existing(self, name: str) -> int:
        # Neither waits for the other side of a pipe nor follows a link that someone has put there.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=self._folder)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        raise ProbeError(f"{self.path}/{name} is no plain file", remedy="remove it")


def release(descriptors: Iterable[int]) -> None:
    """Let go of locks."""
    for descriptor in descriptors:
        os.close(descriptor)


def inherit(descriptors: Iterable[int]) -> None:
    """Let locks live on in the program that this process becomes through exec."""
    for descriptor in descriptors:
        os.set_inheritable(descriptor, True)


def _opened(path: str, group: int | None) -> int:
    made = False
    try:
        if path == SHARED:
            os.makedirs(os.path.dirname(SHARED), exist_ok=True)  # small systems are without /run/lock
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
            made = True
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        found = os.fstat(descriptor)
        # One that was made for all by an earlier release, or by hand, is for all no more.
        if made or (path == SHARED and group is not None and _is_ours(found) and found.st_mode & 0o007):
            _give(descriptor, group)
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        _check(path, os.fstat(descriptor), group)
    except ProbeError:
        os.close(descriptor)
        raise
    return descriptor


def _give(descriptor: int, group: int | None) -> None:
    """Let the folder be the group's, or everybody's; whatever the umask."""
    if group is not None:
        os.fchown(descriptor, -1, group)
    os.fchmod(descriptor, ANYBODY if group is None else MEMBERS)


def _is_ours(folder: os.stat_result) -> bool:
    return os.geteuid() in (0, folder.st_uid)


def _check(path: str, folder: os.stat_result, group: int | None) -> None:
    """Raise ProbeError where somebody could make locks hold for nothing."""
    if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        raise ProbeError(
            f"in {path} anybody may remove the locks of others", remedy=f"chmod {ANYBODY:o} {path}"
        )
    if group is None or folder.st_uid in (0, os.geteuid()):
        return
    import grp
    import pwd

    try:
        owner = pwd.getpwuid(folder.st_uid)
        name, trusted = owner.pw_name, group == owner.pw_gid or owner.pw_name in grp.getgrgid(group).gr_mem
    except KeyError:
        name, trusted = str(folder.st_uid), False
    if not trusted:
        raise ProbeError(
            f"{path}, which has the locks that keep GPUs from being given out twice, is of the user {name}, "
            "who may not start containers",
            remedy=f"have root remove it; the next launch makes it, or `mkdir -m {MEMBERS:o} {path}`",
        )


def _unusable(path: str, error: OSError) -> ProbeError:
    return ProbeError(
        f"the locks that keep GPUs from being given out twice can't be used: {path}: {error.strerror}",
        remedy=f"have root make it: `install -d -m {MEMBERS:o} -g docker {SHARED}`, or `mkdir -m {ANYBODY:o} "
        f"{SHARED}` where no group may start containers; and remove what is in its place",
    )


def _locked(descriptor: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _kernel_locks() -> dict[tuple[int, int, int], int]:
    """Return the process of each flock by device and inode; see proc_locks(5).

    A lock of a process that this one's PID namespace does not have is left out.
    """
    found = {}
    try:
        with open("/proc/locks", encoding="ascii", errors="replace") as file:
            lines = [line.split() for line in file]
    except OSError:
        return {}
    for words in lines:
        # Of those who wait for a lock the line has a word more: "->".
        if len(words) == 8 and words[1] == "FLOCK" and words[4].isdecimal() and words[4] != "0":  # noqa: PLR2004
            major, minor, inode = words[5].split(":")
            found[int(major, 16), int(minor, 16), int(inode)] = int(words[4])
    return found
