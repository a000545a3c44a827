"""Whether the folder of the locks is the one that other launches of this machine use.

In a mount namespace, or in a container that has the engine's socket, the same path may be another
folder. Launches there would take GPUs without seeing the leases of the others.
"""
# os is imported faster than pathlib.
# ruff: noqa: PTH116, PTH120

from __future__ import annotations

import os

from imagematrix.common.text import quote_word
from imagematrix.errors import EngineError, ProbeError
from imagematrix.images.engine import endpoint, system
from imagematrix.launcher.gpu_claims.locks import NAMED, SHARED
from imagematrix.launcher.gpu_claims.processes import read_proc_lines

INIT = 1  # the first process of this PID namespace
MOUNTED = "bind"


def require_shared(path: str, proc: str = "/proc", *, by_scheduler: bool = False) -> None:
    """Raise ProbeError if the lock folder `path` is known to be another one than other launches have.

    Where the engine's process is visible, it or the first process must see the same folder. Otherwise this
    process is in a container: the engine must know that it mounts the folder from the machine. Then a folder
    that IMAGEMATRIX_LOCKS names is taken for the folder of all launches. Without an engine, or with one that
    this user may not ask, other launches are without a daemon, and see what the first process sees. Tasks of
    a batch system, `by_scheduler`, see what its daemon sees, which may have a mount namespace of its own.
    """
    address = endpoint.find_address()
    is_local = address.startswith("unix://")
    peer = endpoint.get_listener_pid(address) if is_local else None
    if by_scheduler and is_local and peer is None:
        return
    if peer == 0:  # the engine is outside this PID namespace
        _require_mounted(path)
        return
    views = [_is_same_folder(path, pid, proc) for pid in (INIT, peer) if pid]
    if False in views and True not in views:
        raise _make_separate_error(path, "the machine has another folder there")


def _is_same_folder(path: str, pid: int, proc: str) -> bool | None:
    """Whether a process sees the same folder, or the parent that exists so far; None if that is hidden."""
    folder = path
    while not os.path.isdir(folder):  # noqa: PTH112
        folder = os.path.dirname(folder)
    try:
        # Links are resolved here: an absolute link below /proc/PID/root would lead back to this process's
        # root (path_resolution(7)).
        mine, theirs = os.stat(folder), os.stat(f"{proc}/{pid}/root{os.path.realpath(folder)}")
    except FileNotFoundError:
        return False
    except OSError:
        # Only who may trace a process may look into its root, but all may read its mounts (proc(5)).
        real = os.path.realpath(folder)
        mounts = [_find_mount(f"{proc}/{process}/mountinfo", real) for process in ("self", pid)]
        return None if None in mounts else mounts[0] == mounts[1]
    return os.path.samestat(mine, theirs)


def _find_mount(table: str, path: str) -> tuple[str, str] | None:
    """Return the device of a path, and the path on it, by a process's table of mounts: see proc(5)."""
    mount = None
    try:
        for line in read_proc_lines(table):
            _, _, device, root, point, *_ = line.split(" ", 5)
            if _is_inside(path, point):
                # No break: later mounts are on top of earlier ones.
                mount = device, os.path.normpath(f"{root}/{path[len(point.rstrip('/')) :]}")
    except ValueError:  # not a table of mounts
        return None
    return mount


def _is_inside(path: str, folder: str) -> bool:
    """Whether a path is a folder, or in it."""
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def _require_mounted(path: str) -> None:
    """Raise ProbeError if this process's container does not have the machine's lock folder at `path`."""
    try:
        mounts = system.get_own_mounts()
    except EngineError:  # the launch reports it
        return
    is_named = os.environ.get(NAMED) == path
    if mounts is None:
        if not is_named:
            raise _make_separate_error(path, "it is unknown which folder of the machine it is")
        return

    # Of the mounts that cover the path, the deepest hides the others.
    covering = [mount for mount in mounts if _is_inside(path, str(mount.get("Destination")))]
    mount = max(covering, key=lambda mount: len(str(mount["Destination"]).rstrip("/")), default=None)
    if mount is None or mount.get("Type") != MOUNTED:
        raise _make_separate_error(path, "this container has one of its own")
    target = str(mount["Destination"]).rstrip("/")
    source = os.path.normpath(f"{mount.get('Source')}/{path[len(target) :]}")
    if source != SHARED and not is_named:
        raise _make_separate_error(path, f"it is {source} of the machine")


def _make_separate_error(path: str, why: str) -> ProbeError:
    folder = os.path.dirname(SHARED)
    return ProbeError(
        f"the GPU locks in {path} are not those of this machine's other launches: {why}",
        remedy=f"start this container with `-v {quote_word(f'{folder}:{folder}')}`, "
        f"or bind the machine's {folder} to it; or name one folder for all launches with {NAMED}",
    )
