"""Starting a container with an OCI runtime, runc or crun, from a bundle.

See config.md and config-linux.md of the OCI runtime specification. The runtime runs in the namespace in which
the image is mounted, as its root, so it neither needs nor gets a user namespace of its own.
"""

from __future__ import annotations

import os

from imagematrix import documents

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from imagematrix.runtimes.container import ContainerSpec

__all__ = ["bundle", "command", "config"]

VERSION = "1.0.2"
RUNC = "runc"
FIRST_FD = 3  # that a runtime passes on (--preserve-fds)
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
# Docker's (oci/defaults.go of moby).
MASKED = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
)
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
PROC = ("/proc", "proc", "proc", ("nosuid", "noexec", "nodev"))
PROC_OF_NODE = ("/proc", "bind", "/proc", ("rbind", "nosuid", "noexec", "nodev"))
MOUNTS = (
    ("/dev", "tmpfs", "tmpfs", ("nosuid", "strictatime", "mode=755", "size=65536k")),
    ("/dev/pts", "devpts", "devpts", ("nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620")),
    # Of the node, so that the ranks of an MPI job share memory, and loaders of data have enough of it.
    ("/dev/shm", "bind", "/dev/shm", ("rbind", "nosuid", "nodev")),  # noqa: S108 - a mount, no file
    ("/sys", "bind", "/sys", ("rbind", "nosuid", "noexec", "nodev", "ro")),
)


def config(container: ContainerSpec, root: str) -> dict[str, Any]:
    """Return the runtime's configuration of a container with the files in the folder `root`."""
    own = container.own_processes
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
                for target, kind, source, options in (PROC if own else PROC_OF_NODE, *MOUNTS)
            ),
            *(_bound(path, path, read_only=False) for path in container.devices),
            *(_bound(bind.source, bind.target, read_only=bind.read_only) for bind in container.binds),
        ],
        "annotations": dict(container.annotations),
        "linux": {
            # The node's network, host name and IPC, as jobs of several processes need them.
            "namespaces": [*([{"type": "pid"}] if own else []), {"type": "mount"}],
            "maskedPaths": list(MASKED),
            "readonlyPaths": list(READ_ONLY),
        },
    }


def bundle(folder: str, container: ContainerSpec, root: str) -> str:
    """Write the bundle of a container into `folder`, and return it; raise OSError."""
    with open(f"{folder}/config.json", "w", encoding="utf-8") as file:  # noqa: PTH123 - pathlib is slow
        file.write(documents.dump(config(container, root)))
    return folder


def command(runtime: str, folder: str, name: str, kept: int = 0, *, own_processes: bool = True) -> list[str]:
    """Return the command that runs the bundle in `folder`, and passes on `kept` descriptors from 3.

    Without `own_processes`, runc warns that it cannot find those of a container without a cgroup: its
    warnings go to a file then, and errors still to stderr.
    """
    log = ["--log", f"{folder}/log"] if runtime == RUNC and not own_processes else []
    words = [runtime, "--root", f"{folder}/state", *log, "run", "--bundle", folder]
    return [*words, *(["--preserve-fds", str(kept)] if kept else []), name]


def environment() -> Mapping[str, str]:
    """Return the variables of the runtime itself."""
    return {"PATH": os.pathsep.join(os.get_exec_path())}


def _bound(source: str, target: str, *, read_only: bool) -> dict[str, object]:
    options = ["rbind", "rro"] if read_only else ["rbind"]  # rro: with all that is mounted in it
    return {"destination": target, "type": "bind", "source": source, "options": options}
