"""Running docker's command in the foreground: with this terminal, its signals, and its exit code.

Exec would need no code at all, but then no process would be left to diagnose a failed container.

Docker's command runs in this process's group, as it would without imagematrix: it shares the terminal's
foreground state, even with a pager in the pipeline, and gets the signals sent to the group. Only signals sent
to this process alone must be forwarded: docker's command counts signals and exits by force at the third. The
receiver of a signal cannot tell whether it was sent to the group. So a third process in the group is the
witness: if it received the signal too, the signal was sent to the group.
"""

# pathlib is slow to import.
# ruff: noqa: PTH123

from __future__ import annotations

import ctypes
import os
import signal
import subprocess

from imagematrix.common.programs import find_program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

# These include job control: docker's command forwards it to the container and does not stop itself.
FORWARDED = frozenset(
    {
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGCONT,
        signal.SIGWINCH,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
    }
)
PR_SET_PDEATHSIG = 1  # of prctl(2)
AGAIN_S = 0.5  # at most this long after its end, the command's end is noticed without its SIGCHLD
SIGNALLED = 128  # a shell's exit code for a command that signal N ended is 128 + N


def run_in_foreground(command: Sequence[str], on_start: Callable[[], None] = lambda: None) -> int:
    """Run a command to its end and return its exit code, 128 + N if signal N ended it.

    `on_start` is called once it runs; threads that it starts receive no signals.

    Each signal to this process or to its group reaches the command once. When the command stops, so does this
    process, so that a shell sees it. If this process is killed, the command gets SIGTERM. Raises OSError if
    the command cannot be started.
    """
    # Signals are blocked and fetched, instead of handled, so that none arrives between a check and the wait.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *FORWARDED})

    def prepare_child() -> None:
        # Without this process, nobody would forward a signal, or diagnose the container.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        # Docker's command would inherit the blocked signals (execve(2)).
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        with (
            _Witness() as witness,
            subprocess.Popen(
                command,
                close_fds=False,  # leases are inherited
                preexec_fn=prepare_child,  # noqa: PLW1509 - no other thread exists yet
            ) as process,
        ):
            on_start()
            while (code := process.poll()) is None:
                # A caller's other thread may take and ignore a SIGCHLD that arrives before this wait.
                received = signal.sigtimedwait({signal.SIGCHLD, *FORWARDED}, AGAIN_S)
                if received is None or received.si_signo == signal.SIGCHLD:
                    _stop_with_command(process)
                elif not witness.has_received(received.si_signo):
                    process.send_signal(received.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return SIGNALLED - code if code < 0 else code


def _stop_with_command(process: subprocess.Popen[bytes]) -> None:
    """If the command has stopped, stop this process too until it is continued."""
    try:
        stopped = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG)
    except ChildProcessError:  # it has ended
        return
    if stopped is not None:
        # SIGTSTP, which is forwarded, is blocked here. SIGSTOP cannot be.
        os.kill(os.getpid(), signal.SIGSTOP)
        process.send_signal(signal.SIGCONT)


class _Witness:
    """A process of this group in which signals stay pending, so that /proc shows which ones it received.

    It ends when this process does. Raises OSError if it cannot be started.
    """

    def __enter__(self) -> Self:
        self._process = self._start_witness()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_process(self._process)

    def has_received(self, signum: int) -> bool:
        """Whether the group has received this signal since the last call.

        The kernel delivers a group's signal to its newest member first, so the witness has it by now.
        """
        received = self._has_pending(signum)
        if received:  # it stays pending, which would hide the next one
            before, self._process = self._process, self._start_witness()
            # The new witness does not have a signal that came before it. The command has just received the
            # same signal from the group, and docker's command ends by force if it counts one too many.
            if signum in signal.sigpending() and not self._has_pending(signum):
                signal.sigtimedwait({signum}, 0)
            self._end_process(before)
        return received

    def _has_pending(self, signum: int) -> bool:
        with open(f"/proc/{self._process.pid}/status", encoding="ascii", errors="replace") as lines:
            pending = next(line for line in lines if line.startswith("ShdPnd:"))
        return bool(int(pending.split()[1], 16) >> (signum - 1) & 1)

    @staticmethod
    def _start_witness() -> subprocess.Popen[bytes]:
        # It reads from a pipe that stays open and empty.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            quiet = subprocess.DEVNULL
            command = [find_program("cat") or "cat"]
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @staticmethod
    def _end_process(process: subprocess.Popen[bytes]) -> None:
        with process:
            process.kill()
