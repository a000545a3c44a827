"""Running docker's command as if this process had become it: its terminal, its signals, its exit code.

Exec would do that with no code at all, but leave nobody to say what the container died of.

Docker's command is a member of this process's group, as it would be without us: so it has the terminal in the
foreground or not, whatever pager is beside it, and gets what is sent to the group. What is sent to this
process alone has to be passed on, and only that: docker's command counts the signals it gets, and ends by
force at the third. kill(2) does not tell the two apart, but a third member of the group does: a signal that
the witness got as well was for all.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

__all__ = ["attend"]

# Also those of job control: docker's command takes them for the container, and does not stop.
PASSED = frozenset(
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
SIGNALLED = 128  # a shell's exit code for a command that a signal ended is this more than the signal


def attend(line: Sequence[str], meanwhile: Callable[[], None] = lambda: None) -> int:
    """Run a command to its end and return its exit code, 128 + N where signal N ended it.

    `meanwhile` is called once it runs; threads that it starts are left alone by signals.

    Each signal to this process or to its group reaches the command once. When it is stopped, so is this
    process, for a shell to see. It is asked to end where this process is killed. Raises OSError where it
    can't be started.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *PASSED})

    def prepare() -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        with (
            _Witness() as witness,
            subprocess.Popen(
                line,
                close_fds=False,  # leases are passed on
                preexec_fn=prepare,  # noqa: PLW1509 - there is no other thread yet
            ) as command,
        ):
            meanwhile()
            while (code := command.poll()) is None:
                got = signal.sigwaitinfo({signal.SIGCHLD, *PASSED}).si_signo
                if got == signal.SIGCHLD:
                    _stop_with(command)
                elif not witness.saw(got):
                    command.send_signal(got)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return SIGNALLED - code if code < 0 else code


def _stop_with(command: subprocess.Popen[bytes]) -> None:
    """Stop where the command has stopped, until somebody continues this process."""
    try:
        stopped = os.waitid(os.P_PID, command.pid, os.WSTOPPED | os.WNOHANG)
    except ChildProcessError:  # it has ended
        return
    if stopped is not None:
        os.kill(os.getpid(), signal.SIGSTOP)
        command.send_signal(signal.SIGCONT)


class _Witness:
    """A process of this group in which signals stay pending, so that the kernel tells which ones it got.

    It ends when this process does. Raises OSError where it can't be started.
    """

    def __enter__(self) -> Self:
        self._process = self._started()
        return self

    def __exit__(self, *_: object) -> None:
        self._end(self._process)

    def saw(self, number: int) -> bool:
        """Whether the group got this signal since this was asked last.

        The kernel gives a group's signal to who joined last first, so the witness has it by now.
        """
        lines = Path(f"/proc/{self._process.pid}/status").read_text("ascii", "replace").splitlines()
        pending = next(line for line in lines if line.startswith("ShdPnd:"))
        found = bool(int(pending.split()[1], 16) >> (number - 1) & 1)
        if found:  # it stays pending: the next one would not show
            before, self._process = self._process, self._started()
            self._end(before)
        return found

    @staticmethod
    def _started() -> subprocess.Popen[bytes]:
        # It waits for the end of a pipe that nobody writes to.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            quiet = subprocess.DEVNULL
            return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        with process:
            process.kill()
