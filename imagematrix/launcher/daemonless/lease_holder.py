"""The lease holder of a container, its keeper: it starts the runtime, and holds the leases until the end.

The keeper stays outside of the container's namespaces. It holds the lease on the image and the locks of the
GPUs, relays streams and signals, and frees everything when the container has ended. The order of a start is:
the leases name the keeper; the container's first process exists, but stands still at a gate; the leases name
that process; the gate opens. So whoever is killed, at any time, the leases name a process that lives as long
as the container.
"""
# pathlib is slow to load.
# ruff: noqa: PTH123, PTH208

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import signal
import time

from imagematrix.images.local_store.holder import RENEW_S, read_mount_namespace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Self

    from imagematrix.images.local_store.folder import Lease
    from imagematrix.launcher.daemonless.runtime import ContainerStart
    from imagematrix.launcher.daemonless.streams import Streams
    from imagematrix.launcher.gpu_claims.gpu_claim import Claim

LOOK_S = 0.05  # between two looks at what nobody reports
ENTRY_S = 10.0  # by then a first process is in its mount namespace
PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)
FORWARDED = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGCONT, signal.SIGWINCH, signal.SIGTSTP),
)
ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)  # of a launch that has not started
SIGNALLED = 128  # a shell's exit code for a process that signal N ended is 128 + N
SET = 128  # bytes of a sigset_t
SIGNALFD_SIGINFO = 128  # bytes of the struct of this name, which begins with the number of the signal
CLOEXEC, NONBLOCK = os.O_CLOEXEC, os.O_NONBLOCK  # of signalfd(2), too


class Signals:
    """The signals that a keeper receives, blocked within the context and read from `descriptor` instead."""

    def __enter__(self) -> Self:
        received = {signal.SIGCHLD, *FORWARDED}
        self.before = signal.pthread_sigmask(signal.SIG_BLOCK, received)
        bits = sum(1 << (number - 1) for number in received)
        libc = ctypes.CDLL(None, use_errno=True)
        mask = ctypes.create_string_buffer(bits.to_bytes(8, "little").ljust(SET, b"\0"), SET)
        self.descriptor = libc.signalfd(-1, mask, CLOEXEC | NONBLOCK)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.before)

    def read_received(self) -> Iterable[int]:
        """Yield the numbers of the signals that have come."""
        with contextlib.suppress(BlockingIOError):
            while text := os.read(self.descriptor, SIGNALFD_SIGINFO):
                yield int.from_bytes(text[:4], "little")


class LeaseHolder:
    """The keeper of the container that the process `runtime` starts, a child of this one.

    `lease` is on the container's image, and `claim` on its GPUs. From the pipe `errors` comes the error of
    the runtime's process, if it has one.
    """

    def __init__(
        self,
        runtime: int,
        container_start: ContainerStart,
        *,
        errors: int,
        signals: Signals,
        streams: Streams,
        lease: Lease,
        claim: Claim | None,
    ) -> None:
        container = container_start.container
        self._runtime = runtime
        self._errors = errors
        self._gate = container_start.gate
        self._signals = signals
        self._streams = streams
        self._lease = lease
        self._claim = claim
        self._strangers = {*container_start.strangers}
        self._start = container_start
        self._isolated = container_start.runtime.is_isolating(container)
        self._enters_later = container_start.runtime.becomes_process and not self._isolated
        # A process of the node stops with this one, as a shell expects it of a job.
        self._stops = container_start.runtime.becomes_process and not container.terminal
        self._first: int | None = None
        self._end: int | None = None  # a descriptor that can be read when the first process has ended
        self._mounts: int | None = None
        self._exit: int | None = None  # of the runtime, once it has ended
        self._renewed = time.monotonic()

    def run(self) -> int:
        """Keep the container to its end; return its exit code, or raise the error with which it failed."""
        try:
            self._first = self._await_first_process()
            if self._first is not None:
                # Apptainer leaves the namespace of the launch, and then looks for its own files by the path
                # of its program, which the kernel knows only as long as the namespace is there.
                with contextlib.suppress(OSError):
                    self._mounts = os.open(f"/proc/{self._runtime}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    self._end = os.pidfd_open(self._first)  # before it can end
                self._name_first_process(self._first)
                self._start.on_standing(self._runtime, self._first, self._start.folder)
                self._reap_children()
                if self._exit is None:  # a runtime that was killed here may have left the process behind
                    self._gate.open()
            self._watch()
            self._raise_error()
        finally:
            # What is left of the container ends, as with a PID namespace, and this waits for it.
            self._gate.close()
            for descriptor in (self._mounts, self._end):
                if descriptor is not None:
                    os.close(descriptor)
            self._end_children(lambda _: True)
            self._streams.finish()
        return 1 if self._exit is None else self._exit

    def _await_first_process(self) -> int | None:
        """Wait until the container's first process stands still; None if the runtime has ended before."""
        waiting = {self._errors, self._gate.ready_pipe, self._signals.descriptor}
        while self._exit is None:
            readable, _, _ = select.select(waiting, (), ())
            if self._errors in readable:
                waiting.discard(self._errors)
                self._raise_error()
            if self._gate.ready_pipe in readable:
                return self._gate.find_first_process(self._runtime)
            for number in self._signals.read_received():
                if number in ENDING:
                    os.kill(self._runtime, signal.SIGKILL)
                    self._await_runtime()
                    self._exit = SIGNALLED + number
            self._reap_children()
        self._raise_error()
        return None

    def _raise_error(self) -> None:
        """Raise the error of the runtime's process, if it has one."""
        if self._errors < 0:
            return
        with open(self._errors, "rb") as file:
            text = file.read()
        self._errors = -1
        if text:
            self._await_runtime()
            raise pickle.loads(text)  # noqa: S301 - of our own process

    def _name_first_process(self, first: int) -> None:
        """Name the container's first process in the leases, and its mount namespace if that counts."""
        mounts = "" if self._isolated else read_mount_namespace(first)
        self._lease = self._lease.with_container(first, mounts)
        if self._claim:
            self._claim.extend_to(self._lease.holder)

    def _watch(self) -> None:
        """Relay signals, and give signs of life, until the runtime has ended."""
        end = self._end
        waiting = {self._signals.descriptor, *(() if end is None else (end,))}
        looking_until = time.monotonic() + (ENTRY_S if self._enters_later else 0)
        while self._exit is None:
            is_looking = time.monotonic() < looking_until
            readable, _, _ = select.select(waiting, (), (), LOOK_S if is_looking else RENEW_S)
            mounts = read_mount_namespace(self._first) if is_looking and self._first is not None else ""
            if self._first is not None and mounts not in ("", self._lease.holder.mounts):
                # The first process has entered its mount namespace, after it was named.
                self._name_first_process(self._first)
                looking_until = 0.0
            if end in readable:
                # They may hold the pipes of a runtime that waits for their end.
                self._end_orphans()
                waiting.discard(end)
            for number in self._signals.read_received():
                self._forward_signal(signal.Signals(number))
            self._reap_children()
            if time.monotonic() - self._renewed >= RENEW_S:
                self._renewed = time.monotonic()
                self._lease.renew()
        if self._first is not None and self._first != self._runtime:
            # It ends before its runtime does, unless that was killed. Nobody waits for it then.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._first, signal.SIGKILL)

    def _end_orphans(self) -> None:
        """End the processes that the first one leaves behind, which are this process's children now."""
        mounts = self._lease.holder.mounts
        self._end_children(lambda child: bool(mounts) and read_mount_namespace(child) == mounts)

    def _forward_signal(self, number: signal.Signals) -> None:
        """Do what a signal to this process means for the container."""
        if number == signal.SIGCHLD:
            return
        if number == signal.SIGWINCH:
            self._streams.resize()
        if number == signal.SIGHUP:
            self._streams.hang_up()
        if number == signal.SIGTSTP:
            self._stop_as_job()
            return
        if self._first is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._first, number)

    def _stop_as_job(self) -> None:
        """Stop as a shell expects it of a job, with a container that is among the processes of the node.

        One with a terminal of its own has its own job control, and a runtime's monitor is not stopped: in a
        PID namespace, the first process would ignore it.
        """
        if self._first is None or not self._stops:
            return
        self._streams.restore()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._first, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._first, signal.SIGCONT)
        self._streams.take_terminal()

    def _reap_children(self) -> None:
        """Reap the children that have ended."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._record_end(pid, status)

    def _await_runtime(self) -> None:
        with contextlib.suppress(ChildProcessError):
            self._record_end(*os.waitpid(self._runtime, 0))

    def _record_end(self, pid: int, status: int) -> None:
        self._strangers.discard(pid)
        if pid == self._runtime:
            code = os.waitstatus_to_exitcode(status)
            self._exit = SIGNALLED - code if code < 0 else code

    def _end_children(self, is_chosen: Callable[[int], bool]) -> None:
        """End the children that are chosen, and wait for it, until none is left."""
        while children := [pid for pid in list_children() if pid not in self._strangers and is_chosen(pid)]:
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            # Its own children become this process's then.
            self._record_end(*os.waitpid(-1, 0))


def adopt_descendants() -> None:
    """Let what descendants leave behind become this process's children: also what serves an image's files."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def list_children() -> list[int]:
    """Return the children of this process, of all its threads; those that have ended are among them."""
    children: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        with (
            contextlib.suppress(OSError),
            open(f"/proc/self/task/{thread}/children", encoding="ascii") as file,
        ):
            children += map(int, file.read().split())
    return children
