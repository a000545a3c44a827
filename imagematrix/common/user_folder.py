"""A folder of the user's own, below a folder in which every user may create files, such as /tmp.

Its name is known beforehand, so that this user's other processes find it. Somebody else may take the name
first: then a number of 1 to 15 follows it. Below a folder with the sticky bit nobody else can rename or
remove what is the user's own, so once checked, its path stays true.
"""
# pathlib is slow to load.
# ruff: noqa: PTH101, PTH102, PTH116, PTH117, PTH118

from __future__ import annotations

import errno
import os
import stat

MODE = 0o700
NUMBERS = 16  # names to try, the first without a number
# Of a name that is free, or taken by what this user may not open as a folder.
NOT_OWN = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM}


def make_user_folder(parent: str, name: str) -> str:
    """Return the path of this user's `name`, or `name.NUMBER`, below `parent`; create it if there is none.

    One that exists goes before a new one, so that all processes of the user come to the same. Raises OSError
    if it cannot be created, with EEXIST if others have taken all names.
    """
    existing = list_user_folders(parent, name)
    if existing:
        return existing[0]

    taken: FileExistsError | None = None
    for path in _list_paths(parent, name):
        try:
            os.mkdir(path, MODE)
        except FileExistsError as error:
            # Another process of this user may have created it in this moment.
            if _is_own(path):
                return path
            taken = error
        else:
            os.chmod(path, MODE)  # an umask may have taken more than it should
            return path
    assert taken is not None  # noqa: S101 - there are names; for the type checker
    raise taken


def find_runtime_folder() -> str | None:
    """Return XDG_RUNTIME_DIR; None if it is not this user's own, as its specification demands.

    `su` leaves that of the user before, who could change what is there.
    """
    path = os.environ.get("XDG_RUNTIME_DIR", "")
    try:
        is_own = os.path.isabs(path) and os.stat(path).st_uid == os.geteuid()
    except OSError:
        return None
    return path if is_own and os.access(path, os.W_OK) else None


def list_user_folders(parent: str, name: str) -> list[str]:
    """Return the paths below `parent` that `make_user_folder` could return, as far as they exist.

    Raises OSError rather than leave one out that cannot be looked at.
    """
    # On NFS, a client remembers for a while which names were free. It asks the server again for what is in a
    # folder when that is opened.
    os.close(os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    return [path for path in _list_paths(parent, name) if _is_own(path)]


def _list_paths(parent: str, name: str) -> list[str]:
    return [os.path.join(parent, f"{name}.{number}" if number else name) for number in range(NUMBERS)]


def _is_own(path: str) -> bool:
    """Whether a path is a folder of this user, in which nobody else may write; links are not followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in NOT_OWN:
            return False
        raise
    try:
        status = os.fstat(descriptor)
        # Where others could write, they may have left something.
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return False
        if stat.S_IMODE(status.st_mode) != MODE:
            os.fchmod(descriptor, MODE)
    finally:
        os.close(descriptor)
    return True
