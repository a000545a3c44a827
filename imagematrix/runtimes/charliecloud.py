"""Starting a container with Charliecloud's ch-run(1).

It becomes the container's process, which is the caller, and passes the whole /dev. So the namespace gets a
/dev of its own first, with the container's devices and no others of their kind.
"""
# pathlib is slow to load.
# ruff: noqa: PTH102, PTH103, PTH118, PTH120, PTH211

from __future__ import annotations

import os

from imagematrix.runtimes.binds import create
from imagematrix.runtimes.container import NETWORK
from imagematrix.runtimes.namespace import BIND, RECURSIVE, mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from imagematrix.runtimes.container import ContainerSpec
    from imagematrix.runtimes.options import Bind

__all__ = ["command", "environment", "own_binds", "own_devices"]

PLAIN = ("null", "zero", "full", "random", "urandom", "tty")  # the devices that config-linux.md lists
FOLDERS = ("pts", "shm")
LINKS = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}


def command(container: ContainerSpec, root: str, user: int, group: int) -> list[str]:
    """Return the command that runs a container with the files in the folder `root`.

    It mounts all folders so that they can be changed, so `binds.read_only` comes before.
    """
    return [
        "ch-run",
        *([] if container.read_only else ["--write"]),
        *("--uid", str(user), "--gid", str(group)),
        "--no-passwd",  # as under docker: it would need files in the image to mount the node's on
        *(word for bind in own_binds(container) for word in ("--bind", f"{bind.source}:{bind.target}")),
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
        create(place)
        mount(path, place, None, BIND)
    for name, target in LINKS.items():
        os.symlink(target, os.path.join(at, name))
    mount(at, "/dev", None, BIND | RECURSIVE)


def own_binds(container: ContainerSpec) -> tuple[Bind, ...]:
    """Return the folders that ch-run is told to mount: the files of the network are its own concern."""
    return tuple(bind for bind in container.binds if bind.source not in NETWORK)
