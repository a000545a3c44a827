"""Starting a container: the namespace, the image's files, and the runtime."""
# pathlib and shutil are slow to load.
# ruff: noqa: PTH118

from __future__ import annotations

import fcntl
import os

from imagematrix.allocation.locks import inherit
from imagematrix.errors import EngineError, UnknownImageError, UsageError
from imagematrix.record import replace
from imagematrix.runtimes import bubblewrap, charliecloud, namespace, oci, program
from imagematrix.runtimes.container import NETWORK
from imagematrix.runtimes.image_root import ROOT, mount_point, mounted
from imagematrix.runtimes.keeper import keep
from imagematrix.site import CHARLIECLOUD, RUNTIMES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.image_store.folder import ImageStore, StoredImage
    from imagematrix.runtimes.container import ContainerSpec

__all__ = ["command_of", "runtime_of", "start"]

HYBRID = "/sys/fs/cgroup/unified"  # a node with cgroup v1 that also mounts v2 there: crun refuses it
FREE = 100  # first number for descriptors that move
BWRAP, CH_RUN = "bwrap", "ch-run"


def runtime_of(engine: str, wanted: str | None) -> str:
    """Return the program with which an engine starts containers.

    Of OCI runtimes it is the `wanted` one, or else the first that this node has. Raises EngineError if it is
    not installed.
    """
    if engine == CHARLIECLOUD:
        wanted = CH_RUN
    for name in (wanted,) if wanted else RUNTIMES:
        if _installed(name) and (wanted or name != "crun" or not os.path.isdir(HYBRID)):  # noqa: PTH112
            return name
    missing = wanted or ", ".join(RUNTIMES)
    package = {BWRAP: "bubblewrap", CH_RUN: "charliecloud-runtime", None: RUNTIMES[0]}.get(wanted, wanted)
    raise EngineError(
        f"no program to start containers without a daemon: {missing} not found",
        remedy=f"install one, such as by `apt install {package}`",
    )


def command_of(container: ContainerSpec, runtime: str) -> list[str]:
    """Return the command that `start` runs, in a namespace with the image's files; raise EngineError."""
    at = mount_point()
    if runtime in (BWRAP, CH_RUN):
        made = bubblewrap.command if runtime == BWRAP else charliecloud.command
        return made(container, f"{at}/{ROOT}", os.geteuid(), os.getegid())
    return oci.command(runtime, at, container.name)


def start(
    container: ContainerSpec, image: StoredImage, runtime: str, store: ImageStore, leases: Sequence[int] = ()
) -> int:
    """Run a container with the files of `image` in `store` to its end, and return its exit code.

    An OCI runtime or Charliecloud replaces this process. `leases` are descriptors that the container's
    process keeps open: a GPU is free once none is left. Raises EngineError if this user may not, or the node
    lacks something, and UsageError if an image that is mounted read-only has no place for a folder.
    """
    if container.terminal and not os.isatty(0):
        raise UsageError("--tty: the input is no terminal", remedy="leave out --tty")
    ids = os.geteuid(), os.getegid()
    at = mount_point()
    keep(store.lease(image.digest))
    if store.find(image.digest) is None:  # another process may remove it until there is a lease
        raise UnknownImageError(f"{image.digest} was removed from {store}", remedy="run the command again")
    namespace.enter()
    root, held = mounted(image, at, read_only=container.read_only)
    program.require(container, root)
    if container.read_only:
        container = _fitted(container, root)
    if not container.interactive:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if held is not None:
        held = _moved(held)
    try:
        return _run(container, runtime, root, at, ids, leases)
    except OSError as error:
        raise EngineError(f"cannot start {runtime}: {error.strerror}") from error


def _run(
    container: ContainerSpec, runtime: str, root: str, at: str, ids: tuple[int, int], leases: Sequence[int]
) -> int:
    """Run a container with a `runtime`; only with bwrap this process remains and returns the exit code."""
    if runtime not in (BWRAP, CH_RUN):
        folder, own = oci.bundle(at, container, root), container.own_processes
        words = oci.command(runtime, folder, container.name, len(leases), own_processes=own)
        _arrange(leases)
        os.execvpe(words[0], words, oci.environment())  # noqa: S606 - without a shell, on purpose
    inherit(leases)
    if runtime == CH_RUN:
        container = charliecloud.read_only_binds(container, namespace.folder(at, "binds"))
        charliecloud.require_targets(container, root)
        charliecloud.own_devices(container.devices, namespace.folder(at, "dev"))
        words = charliecloud.command(container, root, *ids)
        os.execvpe(words[0], words, charliecloud.environment(container))  # noqa: S606 - as above
    words = bubblewrap.command(container, root, *ids)
    if container.terminal:
        os.execvpe(words[0], words, dict(container.environment))  # noqa: S606 - as above
    return bubblewrap.run(words, dict(container.environment))


def _installed(name: str) -> bool:
    return any(os.access(os.path.join(folder, name), os.X_OK) for folder in os.get_exec_path())


def _fitted(container: ContainerSpec, root: str) -> ContainerSpec:
    """Return a container without the files of the node for which a read-only image has no place."""
    there = [bind for bind in container.binds if os.path.lexists(f"{root}{bind.target}")]
    missing = [bind.target for bind in container.binds if bind not in there and bind.source not in NETWORK]
    if missing:
        raise UsageError(
            f"--read-only: the image has no {missing[0]} to mount a folder on",
            remedy="leave out --read-only, or mount it where the image has a folder",
        )
    return replace(container, binds=tuple(there))


def _moved(descriptor: int) -> int:
    """Return the descriptor under a number that is out of the way, to be kept across exec."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD, FREE)
    os.close(descriptor)
    return moved


def _arrange(descriptors: Sequence[int]) -> None:
    """Give descriptors the numbers from 3, which a runtime passes on."""
    for number, descriptor in enumerate([_moved(each) for each in descriptors], oci.FIRST_FD):
        os.dup2(descriptor, number)
        os.close(descriptor)
