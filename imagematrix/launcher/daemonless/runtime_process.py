"""The process that becomes the runtime: it enters the launch's namespace, mounts the image, and prepares.

It sends an error to the keeper through a pipe, which closes when the runtime is executed.
"""
# pathlib is slow to load.
# ruff: noqa: PTH102, PTH118, PTH208

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pickle
import signal
import termios

from imagematrix.common.programs import get_search_path
from imagematrix.common.record import replace
from imagematrix.errors import EngineError
from imagematrix.launcher.daemonless import entrypoint, namespace
from imagematrix.launcher.daemonless.gate import FREE
from imagematrix.launcher.daemonless.image_root import mount_image
from imagematrix.launcher.daemonless.runtime import Place

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from collections.abc import Set as AbstractSet
    from typing import Never

    from imagematrix.launcher.daemonless.container import ContainerSpec
    from imagematrix.launcher.daemonless.runtime import ContainerStart
    from imagematrix.launcher.daemonless.streams import Streams

FILES = "files"  # in the launch's folder: where the image is mounted
PR_SET_PDEATHSIG = 1  # of prctl(2)
FIRST = 3  # number of the first descriptor that a batch system passes
BATCH = "PMI_FD"  # the variable with the number of a connection to the server of PMI-1 and PMI-2
RESET = (signal.SIGPIPE, signal.SIGXFSZ)  # which Python ignores


def become_runtime(
    container_start: ContainerStart,
    streams: Streams,
    errors: int,
    mask: AbstractSet[int | signal.Signals],
    keeper: int,
) -> Never:
    """Start the runtime in this process, a child of the `keeper`.

    An error goes to the pipe `errors`, pickled. `mask` are the signals that the caller had blocked.
    """
    try:
        _exec_runtime(container_start, streams, errors, mask, keeper)
    except BaseException as error:  # noqa: BLE001 - nothing above would handle it
        if isinstance(error, OSError):
            error = EngineError(
                f"cannot start {container_start.runtime.name}: {error.filename or ''} {error.strerror}"
            )
        with contextlib.suppress(OSError), open(errors, "wb") as file:
            file.write(pickle.dumps(error))
    finally:
        os._exit(1)


def _exec_runtime(
    container_start: ContainerStart,
    streams: Streams,
    errors: int,
    mask: AbstractSet[int | signal.Signals],
    keeper: int,
) -> Never:
    container, runtime = container_start.container, container_start.runtime

    # The container gets three descriptors, and what a batch system names. Locks stay with the keeper.
    connection = _duplicate_connection(container)
    _take_streams(streams, terminal=container.terminal)
    if connection is not None:
        os.dup2(connection, FIRST, inheritable=False)
        container = replace(
            container, descriptors=1, environment={**container.environment, BATCH: str(FIRST)}
        )
    passed = {*range(FIRST), *((FIRST,) if connection is not None else ())}
    _close_all_but({*passed, errors, *container_start.gate.descriptors})

    # In the namespace, the user is root.
    ids, environment = (os.geteuid(), os.getegid()), {"PATH": get_search_path()}
    namespace.enter_namespaces()
    if container.apart:
        namespace.leave_node(has_network=container.has_network)
    at = os.path.join(container_start.folder, FILES)
    os.mkdir(at, 0o700)
    root = mount_image(
        container_start.image,
        at,
        container_start.squashfuse,
        read_only=container.read_only,
        layer=container.layer,
    )
    if runtime.ends_with_keeper:
        # Only now: what serves the files of the image would otherwise stay if this ends while it starts.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)

    container = runtime.fit(container, root)
    entrypoint.require_program(container, root)
    place = Place(
        folder=container_start.folder, at=at, root=root, user=ids[0], group=ids[1], environment=environment
    )
    prepared = runtime.prepare(container, place)
    for descriptor in (*prepared.descriptors, *(range(FIRST, FIRST + container.descriptors))):
        os.set_inheritable(descriptor, True)
    for number in RESET:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    prepared.wait()
    os.execve(prepared.words[0], [*prepared.words], prepared.environment)  # noqa: S606 - without a shell


def _duplicate_connection(container: ContainerSpec) -> int | None:
    """Return a copy of the descriptor that a batch system passes to its task, if it does.

    Only a variable of this process counts: an image could name any descriptor.
    """
    text = container.environment.get(BATCH, "")
    if text != os.environ.get(BATCH):
        return None
    if not (text.isascii() and text.isdecimal()) or int(text) < FIRST:
        return None
    try:
        return fcntl.fcntl(int(text), fcntl.F_DUPFD, FREE)
    except OSError:
        return None


def _take_streams(streams: Streams, *, terminal: bool) -> None:
    """Take the container's streams, in a new session, whose terminal can only be the container's own."""
    os.setsid()
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, FREE) for descriptor in streams.descriptors]
    for number, copy in enumerate(copies):
        os.dup2(copy, number)
        os.close(copy)
    if terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _close_all_but(kept: Collection[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # it was the one of the list
                os.close(int(name))
