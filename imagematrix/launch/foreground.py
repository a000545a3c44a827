"""Running docker's command as if this process had become it: its terminal, its signals, its exit code.

Exec would do that with no code at all, but leave nobody to say what the container died of.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["attend"]

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
    }
)
FROM_KERNEL = 0x80  # SI_KERNEL of sigaction(2)
PR_SET_PDEATHSIG = 1  # of prctl(2)
SIGNALLED = 128  # a shell's exit code for a command that a signal ended is this more than the signal


def attend(line: Sequence[str], meanwhile: Callable[[], None] = lambda: None) -> int:
    """Run a command to its end and return its exit code, 128 + N where signal N ended it.

    `meanwhile` is called once it runs; threads that it starts are left alone by signals.

    Signals to this process reach the command. What the terminal sends it has got already, as a member of the
    same process group. Without a terminal it has a group of its own, so that who signals a whole group
    (timeout(1), batch systems) does not signal it twice. It is asked to end where this process is killed.
    Raises OSError where it can't be started.
    """
    terminal = _has_terminal()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *PASSED})

    def prepare() -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        with subprocess.Popen(
            line,
            close_fds=False,  # leases are passed on
            process_group=None if terminal else 0,
            preexec_fn=prepare,  # noqa: PLW1509 - there is no other thread yet
        ) as command:
            meanwhile()
            while (code := command.poll()) is None:
                _pass_on(command, terminal=terminal)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return SIGNALLED - code if code < 0 else code


def _pass_on(command: subprocess.Popen[bytes], *, terminal: bool) -> None:
    """Wait for a signal, and pass it on if the command has not got it."""
    got = signal.sigwaitinfo({signal.SIGCHLD, *PASSED})
    if got.si_signo != signal.SIGCHLD and not (terminal and got.si_code == FROM_KERNEL):
        command.send_signal(got.si_signo)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
