"""Starting a container with an OCI runtime, runc or crun, from a bundle.

See config.md and config-linux.md of the OCI runtime specification. The runtime runs in the namespace in which
the image is mounted, as its root, so it neither needs nor gets a user namespace of its own.
"""

from __future__ import annotations

import os

from imagematrix.common import json_documents
from imagematrix.errors import UsageError
from imagematrix.launcher.daemonless.gate import HookGate
from imagematrix.launcher.daemonless.places import (
    MASKED,
    READ_ONLY,
    SHARED_MEMORY,
    fit_container,
    make_node_read_only,
)
from imagematrix.launcher.daemonless.runtime import FOLDER, RuntimeCommand

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from imagematrix.launcher.daemonless.container import ContainerSpec
    from imagematrix.launcher.daemonless.runtime import Place

VERSION = "1.0.2"
RUNC = "runc"
# Docker's (oci/caps/defaults.go of moby): in a user namespace with one user, they concern only its own files.
CAPABILITIES = (
    "CAP_AUDIT_WRITE",
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_RAW",
    "CAP_SETFCAP",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_SETUID",
    "CAP_SYS_CHROOT",
)
PROC = ("/proc", "proc", "proc", ("nosuid", "noexec", "nodev"))
PROC_OF_NODE = ("/proc", "bind", "/proc", ("rbind", "nosuid", "noexec", "nodev"))
MOUNTS = (
    ("/dev", "tmpfs", "tmpfs", ("nosuid", "strictatime", "mode=755", "size=65536k")),
    ("/dev/pts", "devpts", "devpts", ("nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620")),
    # rro: with all that is mounted in it, such as cgroups.
    ("/sys", "bind", "/sys", ("rbind", "nosuid", "noexec", "nodev", "ro", "rro")),
)


SHM = (SHARED_MEMORY, "tmpfs", "shm", ("nosuid", "noexec", "nodev", "mode=1777"))
SHM_OF_NODE = (SHARED_MEMORY, "bind", SHARED_MEMORY, ("rbind", "nosuid", "nodev"))


class OciRuntime:
    """runc or crun, whose container lives on when the keeper is killed, as under containerd."""

    as_root = True
    becomes_process = False
    ends_with_keeper = False

    def __init__(self, name: str, program: str) -> None:
        self.name = name
        self.program = program

    def require_possible(self, container: ContainerSpec) -> None:
        """See `Runtime`: the configuration is UTF-8."""
        try:
            json_documents.dump_json(make_config(container, "/")).encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{self.name} takes only UTF-8, and a variable or a path of the container has other bytes: "
                f"{error.object[max(0, error.start - 20) : error.end]!r}"
            ) from error

    def is_isolating(self, container: ContainerSpec) -> bool:
        """See `Runtime`."""
        return container.own_processes

    def make_gate(self) -> HookGate:
        """See `Runtime`."""
        self._gate = HookGate()
        return self._gate

    def prepare(self, container: ContainerSpec, place: Place) -> RuntimeCommand:
        """See `Runtime`: write the bundle."""
        if not container.own_processes:
            # The runtime's `readonlyPaths` leave out what is mounted in them: in the node's /proc/sys that is
            # binfmt_misc, by which root of a container could become root of the node.
            make_node_read_only(())
        bundle = make_config(container, place.root)
        bundle["hooks"] = {"createRuntime": [self._gate.make_hook()]}
        with open(f"{place.at}/config.json", "w", encoding="utf-8") as file:  # noqa: PTH123 - pathlib is slow
            file.write(json_documents.dump_json(bundle))
        words = self._format_command(container, place.at)
        return RuntimeCommand(words=words, environment=place.environment, descriptors=self._gate.descriptors)

    def fit(self, container: ContainerSpec, root: str) -> ContainerSpec:
        """See `Runtime`."""
        return fit_container(container, root)

    def format_command(self, container: ContainerSpec) -> list[str]:
        """See `Runtime`."""
        return self._format_command(container, FOLDER)

    def _format_command(self, container: ContainerSpec, folder: str) -> list[str]:
        # Without a PID namespace runc warns that it cannot find the processes of a container without a
        # cgroup: its warnings go to a file then, and errors still to stderr.
        is_quiet = self.name == RUNC and not container.own_processes
        log = ["--log", f"{folder}/log"] if is_quiet else []
        # What its first process leaves behind becomes the keeper's, who ends it.
        options = [] if container.own_processes else ["--no-subreaper"]
        options += ["--preserve-fds", str(container.descriptors)] if container.descriptors else []
        words = [self.program, "--root", f"{folder}/state", *log, "run", *options, "--bundle", folder]
        return [*words, container.name]


def make_config(container: ContainerSpec, root: str) -> dict[str, Any]:
    """Return the runtime's configuration of a container with the files in the folder `root`."""
    has_own_processes = container.own_processes
    mounts = (
        PROC if has_own_processes else PROC_OF_NODE,
        *MOUNTS,
        SHM_OF_NODE if os.path.isdir(SHARED_MEMORY) else SHM,  # noqa: PTH112 - pathlib is slow to load
    )
    return {
        "ociVersion": VERSION,
        "process": {
            "terminal": container.terminal,
            "user": {"uid": 0, "gid": 0},
            "args": list(container.args),
            "env": [f"{name}={value}" for name, value in container.environment.items()],
            "cwd": container.folder,
            "capabilities": {kind: list(CAPABILITIES) for kind in ("bounding", "effective", "permitted")},
            "noNewPrivileges": True,
        },
        "root": {"path": root, "readonly": container.read_only},
        "mounts": [
            *(
                {"destination": target, "type": kind, "source": source, "options": list(options)}
                for target, kind, source, options in mounts
            ),
            *(_make_bind(path, path, read_only=False) for path in container.devices),
            *(_make_bind(bind.source, bind.target, read_only=bind.read_only) for bind in container.binds),
        ],
        "annotations": dict(container.annotations),
        "linux": {
            # The node's network, host name and IPC, as jobs of several processes need them.
            "namespaces": [*([{"type": "pid"}] if has_own_processes else []), {"type": "mount"}],
            "maskedPaths": list(MASKED),
            "readonlyPaths": list(READ_ONLY),
        },
    }


def _make_bind(source: str, target: str, *, read_only: bool) -> dict[str, object]:
    options = ["rbind", "ro"] if read_only else ["rbind"]
    if read_only and os.path.isdir(source):  # noqa: PTH112 - pathlib is slow to load
        options.append("rro")  # with all that is mounted in it; crun 1.8 takes it for no file
    return {"destination": target, "type": "bind", "source": source, "options": options}
