"""Locks in a folder that several machines may share, for which flock is no use.

A lock is a file that its holder makes by link(2), which succeeds for one of them only, on NFS and Lustre too.
The holder gives signs of life by touching it. The lock of a dead holder is removed by the one process that
gets a lock on that removal: the name of this second lock has the token of the dead holder, which never
returns, so nobody can remove the lock of its successor by mistake.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import time

from imagematrix.images.local_store import holder
from imagematrix.images.local_store.holder import BEAT_S, Holder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FIRST_WAIT_S, LONGEST_WAIT_S = 0.02, 1.0
TRIES = 5  # to read a file that others remove
TOLD_S = 30.0  # between two messages to someone who waits
MINE = "try-"  # prefix of the files that are linked to locks
DAMAGED = Holder(host="?", pid=0, started="", boot="", namespace="", token="damaged")  # noqa: S106


@contextlib.contextmanager
def hold_lock(
    path: Path,
    on_wait: Callable[[Holder], object] = lambda _: None,
    until: Callable[[], bool] = lambda: False,
    *,
    wait: bool = True,
) -> Iterator[bool]:
    """Hold the lock `path` within the context, and yield whether it is held.

    It is not if `until` says that there is nothing left to wait for, or without `wait`, if another process
    holds it. `on_wait` gets the holder that is waited for, once and then now and then. Raises OSError.
    """
    with _make_own_file(path.parent) as mine:
        if not _acquire_lock(path, mine, on_wait, until, wait=wait):
            yield False
            return
        ended = threading.Event()
        beating = threading.Thread(target=_renew_until, args=(mine, ended), name="lock", daemon=True)
        beating.start()
        try:
            yield not until()  # asked again: the last holder may have released it since it was asked
        finally:
            ended.set()
            beating.join()
            if _is_same_file(path, mine):
                path.unlink()


def remove_dead_files(folder: Path) -> None:
    """Remove files that dead processes left in a folder of locks; locks themselves stay."""
    with _make_own_file(folder) as mine, contextlib.suppress(OSError):
        for path in folder.iterdir():
            state = _find_holder(path, mine)
            if state is None or state[1]:
                continue
            if path.name.startswith(MINE):
                path.unlink(missing_ok=True)
            elif "." in path.name:  # a lock on the removal of another one
                _break_lock(path, state[0], mine)


@contextlib.contextmanager
def _make_own_file(folder: Path) -> Iterator[Path]:
    """Yield a new file that names this process, for links to it."""
    process = Holder.from_pid()
    path = folder / f"{MINE}{process.host[:64].replace('/', '-')}-{process.pid}-{process.token}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)  # whatever the umask: other users have to read whose it is
            file.write(process.to_bytes())
        yield path
    finally:
        path.unlink(missing_ok=True)


def _acquire_lock(
    path: Path,
    mine: Path,
    on_wait: Callable[[Holder], object],
    until: Callable[[], bool],
    *,
    wait: bool,
) -> bool:
    pause, reported = FIRST_WAIT_S, 0.0
    while not until():
        if _is_linked(mine, path):
            return True
        state = _find_holder(path, mine)
        if state is None:  # it was released just now
            continue
        current, is_alive = state
        if not is_alive:
            _break_lock(path, current, mine)
            continue
        if not wait:
            return False
        if not reported or time.monotonic() - reported > TOLD_S:
            reported = time.monotonic()
            on_wait(current)
        time.sleep(pause * random.uniform(0.5, 1))  # noqa: S311 - so that waiters do not ask all at once
        pause = min(pause * 1.5, LONGEST_WAIT_S)
    return False


def _break_lock(path: Path, dead: Holder, mine: Path) -> None:
    """Remove the lock of a dead holder, unless another process does."""
    right = path.with_name(f"{path.name}.{dead.token}")
    if _is_linked(mine, right):
        state = _find_holder(path, mine)
        if state and state[0].token == dead.token:
            gone = mine.with_name(f"{mine.name}.gone")
            path.rename(gone)
            gone.unlink()
        right.unlink()
        return
    breaker_state = _find_holder(right, mine)
    if breaker_state and not breaker_state[1]:
        _break_lock(right, breaker_state[0], mine)
    elif breaker_state:
        time.sleep(FIRST_WAIT_S)


def _is_linked(mine: Path, path: Path) -> bool:
    """Whether the lock `path` could be linked to `mine`."""
    with contextlib.suppress(FileExistsError):
        path.hardlink_to(mine)
        return True
    return _is_same_file(path, mine)  # the answer to a request that succeeded may have been lost


def _is_same_file(path: Path, mine: Path) -> bool:
    try:
        return path.samefile(mine)
    except FileNotFoundError:
        return False


def _find_holder(path: Path, mine: Path) -> tuple[Holder, bool] | None:
    """Return the holder of a lock and whether it is alive, None if there is no such lock."""
    for again in reversed(range(TRIES)):
        try:
            return _read_lock(path, mine)
        except FileNotFoundError:
            break
        except OSError as error:  # ESTALE: another machine has removed it since it was opened
            if error.errno != errno.ESTALE or not again:
                raise
    return None


def _read_lock(path: Path, mine: Path) -> tuple[Holder, bool]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        owner = holder.read_holder(descriptor) or DAMAGED
        os.utime(mine)  # the file system's clock, which may differ from this machine's
        quiet_s = mine.stat().st_mtime - os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
    return owner, owner.is_alive(quiet_s)


def _renew_until(path: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with contextlib.suppress(OSError):
            os.utime(path)
