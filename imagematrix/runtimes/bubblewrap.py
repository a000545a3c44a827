"""Starting a container with bubblewrap (bwrap(1)), where there is no OCI runtime."""

from __future__ import annotations

import json
import os

from imagematrix.runtimes import session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from imagematrix.runtimes.container import ContainerSpec

__all__ = ["command", "run"]

LINE = 4096  # bytes of what bwrap tells of the process


def command(container: ContainerSpec, root: str, user: int, group: int) -> list[str]:
    """Return the command that runs a container with the files in the folder `root`.

    The process is the caller, with its ids `user` and `group`. It has the variables that bwrap is given.
    """
    own = container.own_processes
    return [
        "bwrap",
        *("--ro-bind" if container.read_only else "--bind", root, "/"),
        *(("--proc", "/proc") if own else ("--bind", "/proc", "/proc")),
        *("--dev", "/dev", "--bind", "/dev/shm", "/dev/shm"),  # noqa: S108 - as of OCI
        *("--ro-bind", "/sys", "/sys"),
        *(word for path in container.devices for word in ("--dev-bind", path, path)),
        *_binds(container),
        *("--unshare-user", "--uid", str(user), "--gid", str(group)),
        *(("--unshare-pid", "--as-pid-1") if own else ()),
        "--die-with-parent",
        *("--chdir", container.folder, "--", *container.args),
    ]


def _binds(container: ContainerSpec) -> Iterator[str]:
    for bind in container.binds:
        yield from ("--ro-bind" if bind.read_only else "--bind", bind.source, bind.target)


def run(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run bwrap's command to its end; return the exit code of the container, 128 + N if signal N ended it.

    A signal would end bwrap, and so the container at once, so signals go to the container's process. Raises
    OSError if bwrap cannot be started.
    """
    told, info = os.pipe()
    os.set_inheritable(info, True)

    def container(_: int) -> int | None:
        os.close(info)
        return _told(told)

    return session.run([words[0], "--info-fd", str(info), *words[1:]], environment, container)


def _told(descriptor: int) -> int | None:
    """Return the process id of the container that bwrap tells; None if it could not start it."""
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(LINE)
    try:
        return int(json.loads(text)["child-pid"])
    except (ValueError, KeyError, TypeError):
        return None
