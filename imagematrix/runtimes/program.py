"""The program that a container starts, looked up in the image before anything is started.

Runtimes do the same, but each has its own exit code for it. These are docker's, and a shell's.
"""
# pathlib is slow to load.
# ruff: noqa: PTH113, PTH114, PTH115, PTH118

from __future__ import annotations

import os

from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.runtimes.container import ContainerSpec

__all__ = ["NotExecutableError", "ProgramNotFoundError", "require"]

HOPS = 40  # links that the kernel follows before it gives up (path_resolution(7))
SYSTEM = ("/dev", "/proc", "/sys")  # not the image's


class ProgramNotFoundError(UsageError):
    """The image has no such program."""

    exit_code = 127


class NotExecutableError(UsageError):
    """The container's command is no program."""

    exit_code = 126


def require(container: ContainerSpec, root: str) -> None:
    """Raise an error unless the command of a container is a program in the folder `root`, or in a bind."""
    name = container.args[0]
    folders = [""] if "/" in name else container.environment.get("PATH", "").split(":")
    places = [os.path.join("/", container.folder, folder, name) for folder in folders]
    targets = (*SYSTEM, *(bind.target for bind in container.binds))
    found = [path for place in places if (path := _resolved(root, place, targets)) is not None]
    if any(not path or (os.path.isfile(path) and os.access(path, os.X_OK)) for path in found):
        return
    if found:
        raise NotExecutableError(f"{name} is not executable in the image")
    raise ProgramNotFoundError(
        f"{name} not found in the image", remedy="name another command after the image"
    )


def _resolved(root: str, path: str, targets: tuple[str, ...]) -> str | None:
    """Return the node's path of a file in the image, with links followed as in the container.

    None if there is no such file, and "" if it is in a folder that something is mounted on.
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
        if inner in targets:
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
        # A folder that leads to one of `targets` is made by the runtime.
        if not os.path.lexists(real) and not any(target.startswith(f"{inner}/") for target in targets):
            return None
        names.append(name)
    return root + "/" + "/".join(names)
