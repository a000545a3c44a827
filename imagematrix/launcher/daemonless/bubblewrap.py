"""Starting a container with bubblewrap (bwrap(1)), where there is no OCI runtime."""

from __future__ import annotations

import os

from imagematrix.errors import UsageError
from imagematrix.launcher.daemonless.gate import BubblewrapGate
from imagematrix.launcher.daemonless.oci import CAPABILITIES
from imagematrix.launcher.daemonless.places import KERNEL_FILES, SHARED_MEMORY, fit_container
from imagematrix.launcher.daemonless.runtime import RuntimeCommand

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.launcher.daemonless.container import ContainerSpec
    from imagematrix.launcher.daemonless.runtime import Place

MOST_WORDS = 9000  # that bwrap takes (MAX_ARGS of bubblewrap.c), those of this program's own among them
RESERVED = 1000
CAPABILITIES_OF_ROOT = ("--cap-drop", "ALL", *(word for name in CAPABILITIES for word in ("--cap-add", name)))


class Bubblewrap:
    """bwrap: the process is the caller, with its own numbers of user and group."""

    name = "bwrap"
    as_root = False
    becomes_process = False
    # bwrap's process does not learn of a keeper that is killed between the gate's opening and its prctl(2)
    # (handle_die_with_parent of bubblewrap.c does not look at its parent): it runs on, with its lease.
    ends_with_keeper = True

    def __init__(self, program: str) -> None:
        self.program = program

    def require_possible(self, container: ContainerSpec) -> None:
        """See `Runtime`."""
        words = 3 * (len(container.environment) + len(container.binds) + len(container.devices))
        if words > MOST_WORDS - RESERVED - len(container.args):
            raise UsageError(
                f"bwrap cannot pass {len(container.environment)} variables and as many paths to a container",
                remedy="use another runtime, such as by IMAGEMATRIX_RUNTIME=runc",
            )

    def is_isolating(self, container: ContainerSpec) -> bool:
        """See `Runtime`."""
        return container.own_processes

    def make_gate(self) -> BubblewrapGate:
        """See `Runtime`."""
        self._gate = BubblewrapGate()
        return self._gate

    def fit(self, container: ContainerSpec, root: str) -> ContainerSpec:
        """See `Runtime`."""
        return fit_container(container, root)

    def prepare(self, container: ContainerSpec, place: Place) -> RuntimeCommand:
        """See `Runtime`: the variables are in a file without a name, since everybody sees command lines."""
        arguments = os.memfd_create("variables")
        words = ["--clearenv"]
        for name, value in container.environment.items():
            words += ["--setenv", name, value]
        with os.fdopen(os.dup(arguments), "wb") as file:
            file.write(b"".join(os.fsencode(word) + b"\0" for word in words))
            file.flush()
            os.lseek(arguments, 0, os.SEEK_SET)
        descriptors = (
            *("--args", str(arguments)),
            *("--info-fd", str(self._gate.info), "--seccomp", str(self._gate.filter)),
        )
        options = _format_options(container, place.root, place.user, place.group)
        return RuntimeCommand(
            words=[self.program, *descriptors, *options],
            environment=place.environment,
            descriptors=(arguments, *self._gate.descriptors),
        )

    def format_command(self, container: ContainerSpec) -> list[str]:
        """See `Runtime`."""
        names = [word for name in container.environment for word in ("--setenv", name, "...")]
        options = _format_options(container, "ROOT", os.geteuid(), os.getegid())
        return [self.program, "--clearenv", *names, *options]


def _format_options(container: ContainerSpec, root: str, user: int, group: int) -> list[str]:
    has_own_processes = container.own_processes
    return [
        *("--ro-bind" if container.read_only else "--bind", root, "/"),
        *(("--proc", "/proc") if has_own_processes else ("--bind", "/proc", "/proc")),
        *("--dev", "/dev"),
        *(("--bind", SHARED_MEMORY) if os.path.isdir(SHARED_MEMORY) else ("--tmpfs",)),  # noqa: PTH112 - pathlib is slow to load
        SHARED_MEMORY,
        *(
            word
            for path in ("/sys", *KERNEL_FILES)
            if os.path.exists(path)  # noqa: PTH110 - pathlib is slow to load
            for word in ("--ro-bind", path, path)
        ),
        *(word for path in container.devices for word in ("--dev-bind", path, path)),
        *(
            word
            for bind in container.binds
            for word in ("--ro-bind" if bind.read_only else "--bind", bind.source, bind.target)
        ),
        *("--unshare-user", "--uid", str(user), "--gid", str(group)),
        *(CAPABILITIES_OF_ROOT if user == 0 else ()),  # any other user has none
        *(("--unshare-pid", "--as-pid-1") if has_own_processes else ()),
        "--die-with-parent",
        *("--chdir", container.folder, "--", *container.args),
    ]
