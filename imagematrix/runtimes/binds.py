"""The folders and files of the node that are mounted in a container, where the runtime lacks a part of it.

Charliecloud and Apptainer mount only on what is in the image, and Apptainer skips a mount with no more than a
warning. Neither makes all of a folder read-only, with what is mounted in it.
"""
# pathlib is slow to load.
# ruff: noqa: PTH103, PTH110, PTH112, PTH120

from __future__ import annotations

import os

from imagematrix.errors import UsageError
from imagematrix.record import replace
from imagematrix.runtimes import namespace
from imagematrix.runtimes.container import NETWORK
from imagematrix.runtimes.inside import resolved

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.runtimes.container import ContainerSpec
    from imagematrix.runtimes.options import Bind

__all__ = ["create", "read_only", "require_folder", "require_targets"]


def read_only(container: ContainerSpec, at: str) -> ContainerSpec:
    """Return a container whose read-only folders are mounted so in the folder `at`; raise OSError."""
    binds = [
        replace(bind, source=namespace.bound(bind.source, f"{at}/{number}"))
        if bind.read_only and bind.source not in NETWORK
        else bind
        for number, bind in enumerate(container.binds)
    ]
    return replace(container, binds=tuple(binds))


def require_targets(binds: Iterable[Bind], root: str) -> None:
    """Make the places of folders and files in the image's files, in the folder `root`.

    Links of the image are followed within it. Raises OSError, and UsageError for a place in another of the
    folders that is not there.
    """
    before: list[Bind] = []
    for bind in binds:
        outer = next((one for one in reversed(before) if bind.target.startswith(f"{one.target}/")), None)
        before.append(bind)
        if outer is not None:
            path = outer.source + bind.target.removeprefix(outer.target)
            if not os.path.exists(path):
                raise UsageError(f"cannot mount {bind.target}: {path} not found", remedy="create it first")
            continue
        place = resolved(root, bind.target, new=True)
        if place is None:
            raise UsageError(f"cannot mount {bind.target}: links of the image go in circles")
        if os.path.lexists(place):
            continue
        if os.path.isdir(bind.source):
            os.makedirs(place)
        else:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            create(place)


def require_folder(container: ContainerSpec, root: str) -> None:
    """Make the folder in which a container starts, as docker does; raise OSError.

    Nothing is made in a folder of the node that is mounted there, or in an image that cannot be changed.
    """
    mounted = [bind.target for bind in container.binds]
    place = resolved(root, container.folder, mounted, new=True)
    if place and not container.read_only:
        os.makedirs(place, exist_ok=True)


def create(path: str) -> None:
    """Make an empty file to mount something on; raise OSError."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
