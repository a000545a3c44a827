"""The command line: one module for each command, loaded when it is called."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its code."""
    from imagematrix.cli.front import run

    raise SystemExit(run(sys.argv[1:]))
