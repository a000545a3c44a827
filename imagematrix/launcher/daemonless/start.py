"""Starting a container: the choice of a runtime, the leases, and the process that becomes the runtime."""
# pathlib and shutil are slow to load.
# ruff: noqa: PTH112

from __future__ import annotations

import os

from imagematrix.common.programs import find_program
from imagematrix.common.settings import APPTAINER, CHARLIECLOUD, RUNTIMES
from imagematrix.common.text import quote_word
from imagematrix.errors import EngineError, UnknownImageError, UsageError
from imagematrix.images.local_store.folder import SQUASHFS
from imagematrix.launcher.daemonless import image_root
from imagematrix.launcher.daemonless.gate import open_pipe
from imagematrix.launcher.daemonless.launch_folder import make_launch_folder
from imagematrix.launcher.daemonless.lease_holder import (
    LeaseHolder,
    Signals,
    adopt_descendants,
    list_children,
)
from imagematrix.launcher.daemonless.process_title import hide_arguments
from imagematrix.launcher.daemonless.runtime import ContainerStart, require_text
from imagematrix.launcher.daemonless.runtime_process import become_runtime
from imagematrix.launcher.daemonless.streams import Streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from imagematrix.images.local_store.folder import ImageStore, StoredImage
    from imagematrix.launcher.daemonless.container import ContainerSpec
    from imagematrix.launcher.daemonless.runtime import Runtime
    from imagematrix.launcher.gpu_claims.gpu_claim import Claim

HYBRID = "/sys/fs/cgroup/unified"  # a node with cgroup v1 that also mounts v2 there: crun refuses it
BWRAP, CH_RUN = "bwrap", "ch-run"
GET_APPTAINER = (
    "install it: https://apptainer.org/docs/admin/latest/installation.html; if it is, name its folder under "
    "program_folders in the site's file"
)
OF_USER = (BWRAP, CH_RUN)  # in whose containers the process has its user's number
PROGRAMS = {CHARLIECLOUD: CH_RUN, APPTAINER: APPTAINER}  # of engines that have only one


def choose_runtime(engine: str, required: str | None, *, of_user: bool = False) -> Runtime:
    """Return the runtime with which an engine starts containers.

    Of OCI runtimes it is the `required` one, or else the first that this node has, with `of_user` one of
    OF_USER before others. Raises EngineError if it is not installed, or if its settings do not let it start
    one.
    """
    required = PROGRAMS.get(engine, required)
    usual = OF_USER + RUNTIMES if of_user else RUNTIMES
    for name in (required,) if required else usual:
        program = find_program(name)
        if program and (required or name != "crun" or not os.path.isdir(HYBRID)):
            return _make_runtime(name, program)
    missing = required or ", ".join(RUNTIMES)
    package = {BWRAP: "bubblewrap", CH_RUN: "charliecloud-runtime", None: RUNTIMES[0]}.get(required, required)
    raise EngineError(
        f"no program to start containers without a daemon: {missing} not found",
        remedy=GET_APPTAINER
        if required == APPTAINER
        else f"install one, such as by `apt install {quote_word(package)}`",
    )


def _make_runtime(name: str, program: str) -> Runtime:
    # Each is loaded only where it starts something: jobs wait for it.
    if name == APPTAINER:
        from imagematrix.launcher.daemonless import apptainer

        apptainer.require_settings(apptainer.locate_settings(program))
        return apptainer.Apptainer(program)
    if name == BWRAP:
        from imagematrix.launcher.daemonless.bubblewrap import Bubblewrap

        return Bubblewrap(program)
    if name == CH_RUN:
        from imagematrix.launcher.daemonless.charliecloud import Charliecloud

        return Charliecloud(program)
    from imagematrix.launcher.daemonless.oci import OciRuntime

    return OciRuntime(name, program)


def run_container(
    container: ContainerSpec,
    image: StoredImage,
    runtime: Runtime,
    store: ImageStore,
    claim: Claim | None = None,
    warn: Callable[[str], object] = lambda _: None,
    on_standing: Callable[[int, int, str], object] = lambda *_: None,
) -> int:
    """Run a container with the files of `image` in `store` to its end, and return its exit code.

    The `claim` on its GPUs lasts as long as the container, also if this process is killed. `warn` gets a
    warning if the image is protected less than usual; for `on_standing` see ContainerStart. Raises
    EngineError if this user may not, or the node lacks something, and UsageError for what the runtime cannot
    do, and for an image that has no place for a mount.
    """
    if container.terminal and not os.isatty(0):
        raise UsageError("--tty: the input is no terminal", remedy="leave out --tty")
    require_text(container)
    runtime.require_possible(container)
    # Before anything of the image is mounted: it could bring a program of this name.
    squashfuse = find_program(*image_root.PROGRAMS) if image.kind == SQUASHFS else None

    lease = store.take_lease(image.digest)
    if lease.path is None:
        warn(
            f"{store} cannot be written to, so nothing protects the image there while the container runs; "
            f"whoever owns it changes this with `install -d -m 1777 {quote_word(f'{store}/leases')}`"
        )
    try:
        if store.find(image.digest) is None:  # another process may remove it until there is a lease
            missing = f"{image.digest} was removed from {store}"
            raise UnknownImageError(missing, remedy="run the command again")
        hide_arguments()
        with make_launch_folder() as folder, Streams(container) as streams, Signals() as signals:
            container_start = ContainerStart(
                container=container,
                image=image,
                runtime=runtime,
                folder=folder,
                gate=runtime.make_gate(),
                squashfuse=squashfuse,
                on_standing=on_standing,
                strangers=list_children(),
            )
            errors, errors_writer = open_pipe()
            keeper = os.getpid()
            adopt_descendants()
            child = os.fork()
            if child == 0:
                become_runtime(container_start, streams, errors_writer, signals.before, keeper)
            for descriptor in (errors_writer, *container_start.gate.descriptors):
                os.close(descriptor)
            streams.start()
            return LeaseHolder(
                child,
                container_start,
                errors=errors,
                signals=signals,
                streams=streams,
                lease=lease,
                claim=claim,
            ).run()
    finally:
        lease.release()
