"""The folder of one launch: what its runtime reads, and where the files of its container are mounted."""
# pathlib, shutil and tempfile are slow to load.
# ruff: noqa: PTH102, PTH106, PTH108, PTH112, PTH118, PTH208

from __future__ import annotations

import contextlib
import fcntl
import os

from imagematrix.common.text import quote_word
from imagematrix.common.user_folder import find_runtime_folder, make_user_folder
from imagematrix.errors import EngineError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "launch-"


def find_containers_folder() -> str:
    """Return the folder of this user's launches; raise EngineError if there is no place for it.

    It is in XDG_RUNTIME_DIR, or else in /tmp, where others may have taken its name.
    """
    runtime = find_runtime_folder()
    parent = runtime or "/tmp"  # noqa: S108 - the owner is checked
    try:
        folder = make_user_folder(parent, "imagematrix" if runtime else f"imagematrix-{os.geteuid()}")
        return make_user_folder(folder, "containers")
    except OSError as error:
        where = error.filename or parent
        raise EngineError(f"{where}: {error.strerror}", remedy="set XDG_RUNTIME_DIR") from error


@contextlib.contextmanager
def make_launch_folder() -> Iterator[str]:
    """Yield a new folder for one launch, and remove it at the end; raise EngineError.

    It is locked meanwhile. Folders of launches that were killed are removed first.
    """
    parent = find_containers_folder()
    for name in os.listdir(parent):
        if name.startswith(PREFIX):
            abandoned = os.path.join(parent, name)
            with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # its process may live
                lock = os.open(abandoned, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_folder(abandoned)

    path = os.path.join(parent, f"{PREFIX}{os.urandom(8).hex()}")
    draft = os.path.join(parent, f".{os.path.basename(path)}")  # noqa: PTH119
    try:
        os.mkdir(draft, 0o700)
        lock = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise EngineError(
            f"{parent}: {error.strerror}", remedy=f"free space there: `df {quote_word(parent)}`"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(draft, path)  # noqa: PTH104 - only a locked folder has a name that is looked for
        yield path
    finally:
        _remove_folder(path)
        os.close(lock)


def _remove_folder(path: str) -> None:
    """Remove a launch's folder with its files; what is mounted in it is so for the container alone."""
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            inner = os.path.join(path, name)
            if os.path.isdir(inner) and not os.path.islink(inner):  # noqa: PTH114
                os.rmdir(inner)
            else:
                os.unlink(inner)
        os.rmdir(path)
