"""Starting a container: the namespace, the image's files, and the runtime."""
# pathlib and shutil are slow to load.
# ruff: noqa: PTH118

from __future__ import annotations

import fcntl
import os

from imagematrix.allocation.locks import inherit
from imagematrix.errors import EngineError, UnknownImageError, UsageError
from imagematrix.record import replace
from imagematrix.runtimes import apptainer, binds, bubblewrap, charliecloud, namespace, oci, program, session
from imagematrix.runtimes.container import NETWORK
from imagematrix.runtimes.image_root import ROOT, mount_point, mounted
from imagematrix.runtimes.keeper import keep
from imagematrix.site import APPTAINER, CHARLIECLOUD, RUNTIMES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from imagematrix.image_store.folder import ImageStore, StoredImage
    from imagematrix.runtimes.container import ContainerSpec

__all__ = ["OF_USER", "as_root", "command_of", "installed", "runtime_of", "start"]

HYBRID = "/sys/fs/cgroup/unified"  # a node with cgroup v1 that also mounts v2 there: crun refuses it
FREE = 100  # first number for descriptors that move
BWRAP, CH_RUN = "bwrap", "ch-run"
GET_APPTAINER = "install it: https://apptainer.org/docs/admin/latest/installation.html"
OF_USER = (BWRAP, CH_RUN)  # in whose containers the process has its user's number
PROGRAMS = {CHARLIECLOUD: CH_RUN, APPTAINER: apptainer.PROGRAM}  # of engines that have only one


def runtime_of(engine: str, wanted: str | None, *, of_user: bool = False) -> str:
    """Return the program with which an engine starts containers.

    Of OCI runtimes it is the `wanted` one, or else the first that this node has, with `of_user` one of
    OF_USER before others. Raises EngineError if it is not installed, or if its settings do not let it start
    one.
    """
    wanted = PROGRAMS.get(engine, wanted)
    usual = OF_USER + RUNTIMES if of_user else RUNTIMES
    for name in (wanted,) if wanted else usual:
        path = installed(name)
        if path and (wanted or name != "crun" or not os.path.isdir(HYBRID)):  # noqa: PTH112
            if name == apptainer.PROGRAM:
                apptainer.require_settings(apptainer.settings_file(path))
            return name
    missing = wanted or ", ".join(RUNTIMES)
    package = {BWRAP: "bubblewrap", CH_RUN: "charliecloud-runtime", None: RUNTIMES[0]}.get(wanted, wanted)
    raise EngineError(
        f"no program to start containers without a daemon: {missing} not found",
        remedy=GET_APPTAINER
        if wanted == apptainer.PROGRAM
        else f"install one, such as by `apt install {package}`",
    )


def as_root(runtime: str) -> bool:
    """Whether a process is root in the containers of a runtime, as OCI runtimes need it, or its own user."""
    return runtime not in (*OF_USER, apptainer.PROGRAM)


def installed(name: str) -> str | None:
    """Return the path of a program, None if this node does not have it."""
    paths = (os.path.join(folder, name) for folder in os.get_exec_path())
    return next((path for path in paths if os.access(path, os.X_OK)), None)


def command_of(container: ContainerSpec, runtime: str) -> list[str]:
    """Return the command that `start` runs, in a namespace with the image's files; raise EngineError."""
    at = mount_point()
    if runtime == apptainer.PROGRAM:
        apptainer.environment(container)  # it may have none
        return apptainer.command(container, f"{at}/{ROOT}")
    if runtime in (BWRAP, CH_RUN):
        made = bubblewrap.command if runtime == BWRAP else charliecloud.command
        return made(container, f"{at}/{ROOT}", os.geteuid(), os.getegid())
    return oci.command(runtime, at, container.name)


def start(
    container: ContainerSpec, image: StoredImage, runtime: str, store: ImageStore, leases: Sequence[int] = ()
) -> int:
    """Run a container with the files of `image` in `store` to its end, and return its exit code.

    An OCI runtime or Charliecloud replaces this process, as does any for a terminal. `leases` are descriptors
    that the container's process keeps open: a GPU is free once none is left. Raises EngineError if this user
    may not, or the node lacks something, and UsageError if an image that is mounted read-only has no place
    for a folder.
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
    """Run a container with a `runtime`; with bwrap or Apptainer and no terminal, this process remains."""
    if as_root(runtime):
        folder, own = oci.bundle(at, container, root), container.own_processes
        words = oci.command(runtime, folder, container.name, len(leases), own_processes=own)
        _arrange(leases)
        os.execvpe(words[0], words, oci.environment())  # noqa: S606 - without a shell, on purpose
    inherit(leases)
    words, variables = _prepared(container, runtime, root, at, ids)
    if runtime == CH_RUN or container.terminal:
        os.execvpe(words[0], words, variables)  # noqa: S606 - as above
    run = bubblewrap.run if runtime == BWRAP else session.run
    return run(words, variables)


def _prepared(
    container: ContainerSpec, runtime: str, root: str, at: str, ids: tuple[int, int]
) -> tuple[list[str], Mapping[str, str]]:
    """Do what a runtime leaves to its caller; return its command, and the variables of that."""
    binds.require_folder(container, root)
    if runtime == BWRAP:
        return bubblewrap.command(container, root, *ids), container.environment
    container = binds.read_only(container, namespace.folder(at, "binds"))
    if runtime == CH_RUN:
        binds.require_targets(charliecloud.own_binds(container), root)
        charliecloud.own_devices(container.devices, namespace.folder(at, "dev"))
        return charliecloud.command(container, root, *ids), charliecloud.environment(container)
    binds.require_targets(container.binds, root)
    return apptainer.command(container, root), apptainer.environment(container)


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
