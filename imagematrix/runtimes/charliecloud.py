"""Starting a container with Charliecloud's ch-run(1).

It becomes the container's process, which is the caller, and passes the whole /dev. So the namespace gets a
/dev of its own first, with the container's devices and no others of their kind.
"""
# pathlib is slow to load.
# ruff: noqa: PTH102, PTH103, PTH112, PTH118, PTH120, PTH211

from __future__ import annotations

import os

from imagematrix.record import replace
from imagematrix.runtimes import namespace
from imagematrix.runtimes.container import NETWORK
from imagematrix.runtimes.namespace import BIND, RECURSIVE, mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from imagematrix.runtimes.container import ContainerSpec

__all__ = ["command", "environment", "own_devices", "read_only_binds", "require_targets"]

PLAIN = ("null", "zero", "full", "random", "urandom", "tty")  # the devices that config-linux.md lists
FOLDERS = ("pts", "shm")
LINKS = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}


def command(container: ContainerSpec, root: str, user: int, group: int) -> list[str]:
    """Return the command that runs a container with the files in the folder `root`.

    It mounts all folders so that they can be changed, so `read_only_binds` come before.
    """
    return [
        "ch-run",
        *([] if container.read_only else ["--write"]),
        *("--uid", str(user), "--gid", str(group)),
        "--no-passwd",  # as under docker: it would need files in the image to mount the node's on
        *(word for bind in _own(container) for word in ("--bind", f"{bind[0]}:{bind[1]}")),
        *("--cd", container.folder, root, "--", *container.args),
    ]


def environment(container: ContainerSpec) -> Mapping[str, str]:
    """Return the variables of the container, and the one without which ch-run does not start."""
    import pwd

    user = os.geteuid()
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        name = str(user)
    return {"USER": name, **container.environment}


def require_targets(container: ContainerSpec, root: str) -> None:
    """Make the places on which ch-run mounts the container's folders; raise OSError."""
    for source, target in _own(container):
        path = root + target
        if os.path.lexists(path):
            continue
        if os.path.isdir(source):
            os.makedirs(path)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            _create(path)


def read_only_binds(container: ContainerSpec, at: str) -> ContainerSpec:
    """Return a container whose read-only folders are mounted so in the folder `at`; raise OSError."""
    binds = [
        replace(bind, source=namespace.bound(bind.source, f"{at}/{number}"))
        if bind.read_only and bind.source not in NETWORK
        else bind
        for number, bind in enumerate(container.binds)
    ]
    return replace(container, binds=tuple(binds))


def own_devices(paths: Iterable[str], at: str) -> None:
    """Mount a /dev with the usual devices and those at `paths` over this namespace's; raise OSError.

    `at` is an empty folder.
    """
    for name in FOLDERS:
        os.mkdir(os.path.join(at, name))
        mount(f"/dev/{name}", os.path.join(at, name), None, BIND | RECURSIVE)
    for path in (*(f"/dev/{name}" for name in PLAIN), *paths):
        place = at + path.removeprefix("/dev")
        os.makedirs(os.path.dirname(place), exist_ok=True)
        _create(place)
        mount(path, place, None, BIND)
    for name, target in LINKS.items():
        os.symlink(target, os.path.join(at, name))
    mount(at, "/dev", None, BIND | RECURSIVE)


def _create(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))


def _own(container: ContainerSpec) -> Iterator[tuple[str, str]]:
    """Yield the folders that ch-run is told to mount: the files of the network are its own concern."""
    yield from ((bind.source, bind.target) for bind in container.binds if bind.source not in NETWORK)
