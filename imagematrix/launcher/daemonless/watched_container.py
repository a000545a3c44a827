"""A container whose keeper is a process of its own, so that another one can watch it, and read what it wrote.

Its changes are in memory, and last as long as somebody has their folder open, as the watching process has.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import threading
import time
from functools import partial

from imagematrix.errors import EngineError
from imagematrix.launcher.daemonless.runtime_process import FILES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Never, Self

PIECE = 1 << 16  # bytes of one read
READY = b"ready"  # with the descriptor of the files
LARGEST_REPORT = 1 << 16  # bytes of a pickled error


class WatchedContainer:
    """The container that `start` runs to its end in a new process; use it as a context, which ends it.

    `start` gets what `run_container` takes as `on_standing`, and returns the exit code. `files` is a
    descriptor of the folder in which the image is mounted, None as long as there is no container; `started`
    is when there was one, in seconds of the monotonic clock.
    """

    def __init__(self, start: Callable[[Callable[[int, int, str], object]], int]) -> None:
        self._start = start
        self.files: int | None = None
        self.started = 0.0
        self._error: BaseException | None = None
        self._code = 0

    def __enter__(self) -> Self:
        self._output, output = os.pipe()
        self._channel, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._is_heard = True  # the keeper may still report something
        self._keeper = os.fork()
        if self._keeper == 0:
            self._channel.close()
            _keep_container(self._start, output, channel)
        os.close(output)
        channel.close()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._await_keeper()
        self._channel.close()
        for descriptor in (self._output, self.files):
            if descriptor is not None:
                os.close(descriptor)

    def read_output(self, timeout_s: float) -> bytes | None:
        """Return a piece of the output, empty at its end; None if nothing came in time."""
        channel = self._channel.fileno()
        waiting = [self._output, *([channel] if self._is_heard else [])]
        readable, _, _ = select.select(waiting, (), (), timeout_s)
        if channel in readable:
            self._receive_report()
        return os.read(self._output, PIECE) if self._output in readable else None

    def end(self) -> None:
        """End the container, with all its processes."""
        if self._keeper:
            self._channel.shutdown(socket.SHUT_WR)
            if self.files is None:  # there is no container yet
                os.kill(self._keeper, signal.SIGTERM)

    def wait_for_end(self) -> int:
        """Wait until all processes of the container have ended, and return its exit code.

        Raises what `start` did, and EngineError if its process was killed.
        """
        self._await_keeper()
        if self._error is not None:
            raise self._error
        if self._code < 0:
            raise EngineError(
                "the process that kept the container was killed", remedy="run the command again"
            )
        return self._code

    def _await_keeper(self) -> None:
        if self._keeper:
            _, status = os.waitpid(self._keeper, 0)
            self._keeper, self._code = 0, os.waitstatus_to_exitcode(status)
        while self._is_heard:
            self._receive_report()

    def _receive_report(self) -> None:
        """Take the descriptor of the files, or an error, from the keeper."""
        report, descriptors, _, _ = socket.recv_fds(self._channel, LARGEST_REPORT, 1)
        if descriptors:
            (self.files,) = descriptors
            self.started = time.monotonic()
        elif report:
            self._error = pickle.loads(report)  # noqa: S301 - of our own process
        else:
            self._is_heard = False


def _keep_container(
    start: Callable[[Callable[[int, int, str], object]], int], output: int, channel: socket.socket
) -> Never:
    """Keep a container in this process, which ends with it; errors and its files go through the channel."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()  # signals of a terminal are for the other process, which ends this one
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        code = start(partial(_report_container, channel))
    except BaseException as error:  # noqa: BLE001 - the other process raises it
        channel.send(pickle.dumps(error))
    finally:
        os._exit(code)


def _report_container(channel: socket.socket, runtime: int, first: int, folder: str) -> None:
    """Send the descriptor of a container's files, and end the container with whom it is sent to."""
    files = os.open(
        f"/proc/{runtime}/root{os.path.realpath(folder)}/{FILES}",
        os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC,
    )
    socket.send_fds(channel, [READY], [files])
    os.close(files)
    with contextlib.suppress(ProcessLookupError):  # it has ended
        process = os.pidfd_open(first)
        threading.Thread(target=_end_with_watcher, args=(channel, process), daemon=True).start()


def _end_with_watcher(channel: socket.socket, process: int) -> None:
    """Kill a process once the other end of the channel is closed."""
    channel.recv(1)
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
