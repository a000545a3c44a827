"""Which files a matrix may name: those inside of a folder, wherever links lead.

A matrix and its templates may come from a pull request, and what they name is read and shown.
"""

from __future__ import annotations

import os.path

__all__ = ["inside"]


def inside(folder: str, name: str) -> str | None:
    """Return the path of what `name` is in `folder`, links resolved; None where that leads out of it.

    A name that is absolute, or goes up, leads out even where it comes back: it would mean something else on
    another machine.
    """
    if name.startswith("/") or ".." in name.split("/"):
        return None
    root, found = os.path.realpath(folder), os.path.realpath(f"{folder}/{name}")
    return found if os.path.commonpath([root, found]) == root else None
