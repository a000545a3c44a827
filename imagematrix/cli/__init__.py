"""The command line: one module for each command, loaded when it is called.

Groups of commands are in `kubernetes`, `slurm` and `swarm`; `shared` has what commands share.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

# New objects after which Python looks among them for garbage, in place of 700: what a short command makes, it
# keeps.
YOUNG = 10_000


def main() -> None:
    """Run the command line and exit with its code.

    Until `run_command` can report Ctrl-C, it ends the process as it ends any other program, without a
    traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if the caller ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.set_threshold(YOUNG)
    from imagematrix.cli.dispatch import ENDED_BY_SIGNAL, run_command

    code = run_command(sys.argv[1:])
    if code in ENDED_BY_SIGNAL:
        _exit_at_once(code)
    gc.freeze()  # otherwise Python looks through all modules for cycles while it unloads them
    raise SystemExit(code)


def _exit_at_once(code: int) -> None:
    """Exit at once: Python would wait for threads, and those may wait for an engine or a registry."""
    os._exit(code)
