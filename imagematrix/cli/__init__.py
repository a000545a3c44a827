"""The command line: one module for each command, loaded when it is called."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line; every error of the package ends here, with its exit code."""
    from imagematrix.cli.app import run

    raise SystemExit(run())
