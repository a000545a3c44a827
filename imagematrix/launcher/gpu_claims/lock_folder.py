"""Whether the folder of the locks is the one that other launches of this machine use.

In a mount namespace, or in a container that was given the engine's socket, the same path may be another
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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

INIT = 1  # the first process of this PID namespace
MOUNTED = "bind"


def require_shared(path: str, proc: str = "/proc") -> None:
    """Raise ProbeError if the lock folder `path` is known to be another one than other launches have.

    Where the engine's process is visible, it or the first process must see the same folder. Otherwise this
    process is in a container: the engine must know that it mounts the folder from the machine. Then a folder
    that IMAGEMATRIX_LOCKS names is believed to be the one that all launches have been told. Without an engine
    there are no launches.
    """
    where = endpoint.find_address()
    local = where.startswith("unix://")
    peer = endpoint.get_listener_pid(where) if local else None
    if local and peer is None:
        return
    if peer == 0:  # the engine is outside this PID namespace
        _require_mounted(path)
        return
    views = [_is_same_folder(path, pid, proc) for pid in (INIT, peer) if pid]
    if False in views and True not in views:
        raise _separate_error(path, "the machine has another folder there")


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
        seen = [_find_mount(f"{proc}/{process}/mountinfo", real) for process in ("self", pid)]
        return None if None in seen else seen[0] == seen[1]
    return os.path.samestat(mine, theirs)


def _find_mount(table: str, path: str) -> tuple[str, str] | None:
    """Return the device of a path, and the path on it, by a process's table of mounts: see proc(5)."""
    found = None
    try:
        for line in read_proc_lines(table):
            _, _, device, root, point, *_ = line.split(" ", 5)
            if _is_inside(path, point):
                # No break: later mounts are on top of earlier ones.
                found = device, os.path.normpath(f"{root}/{path[len(point.rstrip('/')) :]}")
    except ValueError:  # not a table of mounts
        return None
    return found


def _is_inside(path: str, folder: str) -> bool:
    """Whether a path is a folder, or in it."""
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def _require_mounted(path: str) -> None:
    try:
        mounts = system.get_own_mounts()
    except EngineError:  # the launch reports it
        return
    named = os.environ.get(NAMED) == path
    if mounts is None:
        if not named:
            raise _separate_error(path, "it is unknown which folder of the machine it is")
        return
    source = _find_source(path, mounts)
    if source is None:
        raise _separate_error(path, "this container has one of its own")
    if source != SHARED and not named:
        raise _separate_error(path, f"it is {source} of the machine")


def _find_source(path: str, mounts: Iterable[Mapping[str, object]]) -> str | None:
    """Return the machine's path of a path in a container, None if it is not from the machine."""
    covering = [mount for mount in mounts if _is_inside(path, str(mount.get("Destination")))]
    if not covering:
        return None
    mount = max(covering, key=_depth)  # the deepest hides the others
    if mount.get("Type") != MOUNTED:
        return None
    return os.path.normpath(f"{mount.get('Source')}/{path[_depth(mount) :]}")


def _depth(mount: Mapping[str, object]) -> int:
    return len(str(mount.get("Destination")).rstrip("/"))


def _separate_error(path: str, why: str) -> ProbeError:
    folder = os.path.dirname(SHARED)
    return ProbeError(
        f"the GPU locks in {path} are not those of this machine's other launches: {why}",
        remedy=f"start this container with `-v {quote_word(f'{folder}:{folder}')}`, "
        f"or bind the machine's {folder} to it; or name one folder for all launches with {NAMED}",
    )
