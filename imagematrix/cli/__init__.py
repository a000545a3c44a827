"""The command line: one module for each command, loaded when it is called."""

from __future__ import annotations

import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its code.

    Until `run` can report Ctrl-C, it ends the process as it ends any other program, without a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if the caller ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from imagematrix.cli.front import run

    raise SystemExit(run(sys.argv[1:]))
