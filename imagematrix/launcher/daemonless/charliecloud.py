"""Starting a container with Charliecloud's ch-run(1).

It becomes the container's process, which is the caller, and passes the whole /dev. So the namespace gets a
/dev of its own first, with the container's devices and no others of their kind.
"""
# pathlib is slow to load.
# ruff: noqa: PTH102, PTH103, PTH112, PTH118, PTH120, PTH211

from __future__ import annotations

import os

from imagematrix.errors import UsageError
from imagematrix.launcher.daemonless import namespace
from imagematrix.launcher.daemonless.gate import OwnGate
from imagematrix.launcher.daemonless.namespace import BIND, RECURSIVE, mount
from imagematrix.launcher.daemonless.places import (
    SHARED_MEMORY,
    create_mount_point,
    fit_container,
    make_node_read_only,
    mount_read_only_sources,
)
from imagematrix.launcher.daemonless.runtime import FOLDER, RuntimeCommand

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.launcher.daemonless.container import ContainerSpec
    from imagematrix.launcher.daemonless.runtime import Place

PLAIN = ("null", "zero", "full", "random", "urandom", "tty")  # the devices that config-linux.md lists
LINKS = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
# On which ch-run mounts the node's by itself (BINDS_DEFAULT of ch_core.c), with the image's links followed.
FILES = ("/etc/hosts", "/etc/machine-id", "/etc/resolv.conf")
FOLDERS = ("/tmp",)  # noqa: S108 - in the image
VARIABLES = "environment"  # in the launch's folder
QUOTE = "'"


class Charliecloud:
    """ch-run: the process is the caller, with its own numbers, among the processes of the node."""

    name = "ch-run"
    as_root = False
    becomes_process = True
    ends_with_keeper = True

    def __init__(self, program: str) -> None:
        self.program = program

    def require_possible(self, container: ContainerSpec) -> None:
        """See `Runtime`: variables are lines of a file, and mounts are SOURCE:TARGET."""
        for name, value in container.environment.items():
            if "\n" in name or "\n" in value:
                raise UsageError(
                    f"Charliecloud cannot set the variable {name}, which has several lines",
                    remedy="leave it out (`-e NAME=` empties it), or use --engine oci",
                )
        for bind in container.binds:
            if ":" in bind.source or ":" in bind.target:
                raise UsageError(
                    f"Charliecloud cannot mount {bind.source} at {bind.target}: a colon separates the two",
                    remedy="use --engine oci",
                )

    def is_isolating(self, container: ContainerSpec) -> bool:  # noqa: ARG002 - of the protocol
        """See `Runtime`."""
        return False

    def make_gate(self) -> OwnGate:
        """See `Runtime`."""
        self._gate = OwnGate()
        return self._gate

    def fit(self, container: ContainerSpec, root: str) -> ContainerSpec:
        """See `Runtime`."""
        return fit_container(container, root, FILES, FOLDERS)

    def prepare(self, container: ContainerSpec, place: Place) -> RuntimeCommand:
        """See `Runtime`: write the variables, and mount what ch-run mounts otherwise."""
        container = mount_read_only_sources(container, namespace.make_memory_folder(place.at, "binds"))
        path = os.path.join(place.folder, VARIABLES)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            for name, value in container.environment.items():
                # ch-run removes a pair of quotes around a value.
                is_quoted = len(value) > 1 and value.startswith(QUOTE) and value.endswith(QUOTE)
                line = f"{name}={QUOTE}{value}{QUOTE}\n" if is_quoted else f"{name}={value}\n"
                file.write(os.fsencode(line))
        mount_devices(
            container.devices, namespace.make_memory_folder(place.at, "dev"), terminal=container.terminal
        )
        make_node_read_only(FILES)
        os.chdir(place.folder)  # an option with a path that has a "=" would be a variable
        return RuntimeCommand(
            words=_format_command(self.program, container, place.root, place.user, place.group),
            environment={**place.environment, "USER": _find_user_name(place.user)},  # which ch-run needs
            wait=self._gate.wait,
        )

    def format_command(self, container: ContainerSpec) -> list[str]:
        """See `Runtime`."""
        return _format_command(self.program, container, f"{FOLDER}/root", os.geteuid(), os.getegid())


def _format_command(program: str, container: ContainerSpec, root: str, user: int, group: int) -> list[str]:
    """Return the command; it mounts all folders so that they can be changed."""
    # The files of the network are its own concern.
    binds = [bind for bind in container.binds if not bind.of_network]
    return [
        program,
        *([] if container.read_only else ["--write"]),
        *("--uid", str(user), "--gid", str(group)),
        "--no-passwd",  # as under docker: it would need files in the image to mount the node's on
        *("--unset-env=*", "--env-no-expand", f"--set-env=./{VARIABLES}"),
        *(word for bind in binds for word in ("--bind", f"{bind.source}:{bind.target}")),
        *("--cd", container.folder, root, "--", *container.args),
    ]


def _find_user_name(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def mount_devices(paths: Iterable[str], at: str, *, terminal: bool = False) -> None:
    """Mount a /dev with the usual devices and those at `paths` over this namespace's; raise OSError.

    `at` is an empty folder. It has terminals of its own, and with `terminal` that of this process.
    """
    shm, terminals = os.path.join(at, "shm"), os.path.join(at, "pts")
    os.mkdir(shm)
    if os.path.isdir(SHARED_MEMORY):
        mount(SHARED_MEMORY, shm, None, BIND | RECURSIVE)
    os.mkdir(terminals)
    mount("devpts", terminals, "devpts", options="newinstance,ptmxmode=0666,mode=0620")
    if terminal:
        create_mount_point(os.path.join(at, "console"))
        mount(os.ttyname(0), os.path.join(at, "console"), None, BIND)
    for path in (*(f"/dev/{name}" for name in PLAIN), *paths):
        place = at + path.removeprefix("/dev")
        os.makedirs(os.path.dirname(place), exist_ok=True)
        create_mount_point(place)
        mount(path, place, None, BIND)
    for name, target in LINKS.items():
        os.symlink(target, os.path.join(at, name))
    mount(at, "/dev", None, BIND | RECURSIVE)
