"""Which files a matrix may name: those inside a folder, with links resolved.

A matrix and its templates may come from a pull request, and the files that they name are read and shown.
"""

from __future__ import annotations

import os.path


def resolve_inside(folder: str, name: str) -> str | None:
    """Return the path of `name` in `folder` with links resolved, or None if it is outside.

    An absolute name, or one with .., counts as outside even if it leads back: on another machine it would be
    another file. So does one with a null byte, which no file has in its name.
    """
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        return None
    path = f"{folder}/{name}"
    return os.path.realpath(path) if is_below(folder, path) else None


def is_below(folder: str, path: str) -> bool:
    """Whether `path`, with links resolved, is `folder` or in it."""
    root, target = os.path.realpath(folder), os.path.realpath(path)
    return os.path.commonpath([root, target]) == root
