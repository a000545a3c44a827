"""Running a runtime's program in a session of its own, with signals forwarded to the container."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess

from imagematrix.launcher.foreground import AGAIN_S, FORWARDED, PR_SET_PDEATHSIG, SIGNALLED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["run"]


def run(
    words: Sequence[str],
    environment: Mapping[str, str],
    target: Callable[[int], int | None] = lambda pid: pid,
) -> int:
    """Run a command to its end and return its exit code, 128 + N if signal N ended it.

    It is out of reach of the terminal's signals. Those that this process receives go to the process that
    `target` returns for that of the command, None for nowhere. If this process is killed, so is the command.
    Raises OSError if the command cannot be started.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *FORWARDED})

    def prepare() -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        with subprocess.Popen(
            words,
            env=environment,
            close_fds=False,  # leases, and what keeps the image mounted
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509 - no other thread exists yet
        ) as process:
            receiver = target(process.pid)
            # Without a terminal there is no job control, and a stopped runtime waits for nothing any more.
            held_back = {signal.SIGCHLD, *([signal.SIGTSTP] if receiver == process.pid else [])}
            while (code := process.poll()) is None:
                received = signal.sigtimedwait({signal.SIGCHLD, *FORWARDED}, AGAIN_S)
                if received and receiver and received.si_signo not in held_back:
                    os.kill(receiver, received.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return SIGNALLED - code if code < 0 else code
