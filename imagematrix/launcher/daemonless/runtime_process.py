"""The process that becomes the runtime: it enters the launch's namespace, mounts the image, and prepares.

What it cannot do it tells the keeper as an error, through a pipe that closes when the runtime is executed.
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
    launching: ContainerStart,
    streams: Streams,
    report: int,
    mask: AbstractSet[int | signal.Signals],
    keeper: int,
) -> Never:
    """Start the runtime in this process, a child of the `keeper`; an error goes to `report`, pickled.

    `mask` are the signals that the caller had blocked.
    """
    try:
        _start(launching, streams, report, mask, keeper)
    except BaseException as error:  # noqa: BLE001 - nothing above would handle it
        if isinstance(error, OSError):
            error = EngineError(
                f"cannot start {launching.runtime.name}: {error.filename or ''} {error.strerror}"
            )
        with contextlib.suppress(OSError), open(report, "wb") as file:
            file.write(pickle.dumps(error))
    finally:
        os._exit(1)


def _start(
    launching: ContainerStart,
    streams: Streams,
    report: int,
    mask: AbstractSet[int | signal.Signals],
    keeper: int,
) -> Never:
    container, runtime = launching.container, launching.runtime

    # The container gets three descriptors, and what a batch system names. Locks stay with the keeper.
    connection = _duplicate_connection(container)
    _take_streams(streams, terminal=container.terminal)
    if connection is not None:
        os.dup2(connection, FIRST, inheritable=False)
        container = replace(
            container, descriptors=1, environment={**container.environment, BATCH: str(FIRST)}
        )
    passed = {*range(FIRST), report, *launching.gate.inherited, *((FIRST,) if connection is not None else ())}
    _close_all_but(passed)

    # In the namespace, the user is root.
    ids, environment = (os.geteuid(), os.getegid()), {"PATH": get_search_path()}
    namespace.enter_namespaces()
    at = os.path.join(launching.folder, FILES)
    os.mkdir(at, 0o700)
    root = mount_image(launching.image, at, launching.squashfuse, read_only=container.read_only)
    if runtime.ends_with_keeper:
        # Only now: what serves the files of the image would otherwise stay if this ends while it starts.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)

    container = runtime.fit(container, root)
    entrypoint.require_program(container, root)
    place = Place(
        folder=launching.folder, at=at, root=root, user=ids[0], group=ids[1], environment=environment
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

    It is this process's variable that says so: an image could name any descriptor.
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
    """Have the container's streams, in a session without a terminal but its own."""
    os.setsid()
    copies = [fcntl.fcntl(given, fcntl.F_DUPFD, FREE) for given in streams.given]
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
