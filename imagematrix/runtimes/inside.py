"""Paths in a container, found among the image's files with links followed as in the container."""
# pathlib is slow to load.
# ruff: noqa: PTH114, PTH115

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["resolved"]

HOPS = 40  # links that the kernel follows before it gives up (path_resolution(7))


def resolved(root: str, path: str, mounted: Sequence[str] = (), *, new: bool = False) -> str | None:
    """Return the node's path of a file in the image whose files are in the folder `root`.

    None if there is no such file, unless it may be `new`, and "" if it is in a folder of the container that
    something is `mounted` on.
    """
    names: list[str] = []
    ahead = path.split("/")[::-1]
    hops = 0
    while ahead:
        name = ahead.pop()
        if name in ("", "."):
            continue
        if name == "..":
            names = names[:-1]
            continue
        inner = "/" + "/".join([*names, name])
        if inner in mounted:
            return ""
        real = root + inner
        if os.path.islink(real):
            hops += 1
            if hops > HOPS:
                return None
            target = os.readlink(real)
            names = [] if target.startswith("/") else names
            ahead += target.split("/")[::-1]
            continue
        # A folder that leads to one of `mounted` is made by the runtime.
        leads = any(target.startswith(f"{inner}/") for target in mounted)
        if not (new or leads or os.path.lexists(real)):
            return None
        names.append(name)
    return root + "/" + "/".join(names)
