"""The program that a container starts, looked up in the image before anything is started.

Runtimes do the same, but each has its own exit code for it. These are docker's, and a shell's.
"""
# pathlib is slow to load.
# ruff: noqa: PTH113, PTH118

from __future__ import annotations

import os

from imagematrix.errors import UsageError
from imagematrix.launcher.daemonless.path_resolution import ImageFiles, InMountError
from imagematrix.launcher.daemonless.places import SYSTEM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.launcher.daemonless.container import ContainerSpec


class ProgramNotFoundError(UsageError):
    """The image has no such program."""

    exit_code = 127


class NotExecutableError(UsageError):
    """The container's command is no program."""

    exit_code = 126


def require_program(container: ContainerSpec, root: str) -> None:
    """Raise an error unless the command of a container is a program in the folder `root`, or in a bind."""
    name = container.args[0]
    folders = [""] if "/" in name else container.environment.get("PATH", "").split(":")
    places = [os.path.join("/", container.folder, folder, name) for folder in folders]
    files = []
    with ImageFiles(root, SYSTEM, container.binds) as image:
        for place in places:
            try:
                path = image.find(place)
            except InMountError as error:
                # A link there could lead to what a runtime has open, and so to a program of the node.
                raise ProgramNotFoundError(
                    f"{name} is looked for in {error.where}, which has no program",
                    remedy="name another command or PATH",
                ) from error
            except OSError:  # a loop, or a folder that nobody may look into
                continue
            if path is not None:
                files.append(image.locate(path))
    if any(os.path.isfile(path) and os.access(path, os.X_OK) for path in files):
        return
    if files:
        raise NotExecutableError(f"{name} is not executable in the image")
    raise ProgramNotFoundError(
        f"{name} not found in the image", remedy="name another command after the image"
    )
