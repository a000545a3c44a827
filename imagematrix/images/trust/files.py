"""The files of the policies that apply to a process: the site's, and the user's; and what may be in them.

It loads nothing, because `select` calls it.
"""
# os is imported faster than pathlib.
# ruff: noqa: PTH109, PTH114, PTH115, PTH116, PTH117, PTH118, PTH120

from __future__ import annotations

import errno
import os
import stat

from imagematrix.common.text import quote_word
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

SITE = "/etc/imagematrix/policy.json"
VARIABLE = "IMAGEMATRIX_POLICY"
LINKS = 40  # on the way to a file, as the kernel allows


def list_policy_files(path: str | PathLike[str] | None = None) -> tuple[str, ...]:
    """Return the files of the policies, each of which an image has to satisfy; none if there is no policy.

    They are the site's, and the user's: `path`, or else the one that the environment names. Raises
    UsageError if it is unknown whether the site has one.
    """
    files = []
    try:
        os.lstat(SITE)  # a link without a target is a mistake, not a site without a policy
        files.append(SITE)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise UsageError(f"{SITE} cannot be read: {error.strerror}") from error
    user_file = os.fspath(path) if path is not None else os.environ.get(VARIABLE) or None
    if user_file is not None and user_file not in files:
        files.append(user_file)
    return tuple(files)


def read_trusted(path: str | PathLike[str], limit: int) -> bytes:
    """Return the content of a file that decides which images are trusted, a policy or a key.

    Raises UsageError if it cannot be read, is not a regular file, has more than `limit` bytes, or is one that
    everybody can change or replace.
    """
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise UsageError(f"{path} is not a regular file", remedy="copy its content to one")
            raw = file.read(limit + 1)
        folders = dict.fromkeys(_list_folders(os.fspath(path)))
        loose = path if mode & stat.S_IWOTH else next(filter(_may_be_replaced, folders), None)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # a null character
        raise UsageError(f"{path!r:.80} is not the path of a file") from error
    if loose is not None:
        raise UsageError(f"everybody can change {path}", remedy=f"`chmod o-w {quote_word(loose)}`")
    if len(raw) > limit:
        raise UsageError(f"{path} has more than {limit} bytes")
    return raw


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file, of which nobody knows yet that it is no pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _list_folders(path: str) -> Iterator[str]:
    """Yield the folders of all names on the way to a file, also on the ways that links on it lead.

    Raises OSError if somebody changes the links so that they do not end.
    """
    names = _split_path(path if os.path.isabs(path) else os.path.join(os.getcwd(), path))
    folder, links = "/", 0
    while names:
        yield folder
        place = os.path.join(folder, name := names.pop(0))
        if name == "..":
            folder = os.path.dirname(folder)
        elif not os.path.islink(place):
            folder = place
        elif links < LINKS:
            links += 1
            target = os.readlink(place)
            names = _split_path(target) + names
            folder = "/" if os.path.isabs(target) else folder
        else:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _split_path(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def _may_be_replaced(folder: str) -> bool:
    """Whether everybody can replace the files in a folder, which the sticky bit of /tmp forbids.

    Kubernetes mounts such folders read-only.
    """
    mode = os.stat(folder).st_mode
    loose = mode & stat.S_IWOTH and not mode & stat.S_ISVTX
    return bool(loose) and not os.statvfs(folder).f_flag & os.ST_RDONLY
