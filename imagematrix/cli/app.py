"""The command line as a whole: its commands, and how an error ends it."""

from __future__ import annotations

import io
import signal
import sys
from typing import Annotated

import typer

from imagematrix.cli import build, explain, init, launch, ls, plan, probe, render, select, validate
from imagematrix.cli.output import complain
from imagematrix.errors import ImagematrixError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

__all__ = ["app", "run"]

TERMINATED = 143  # 128 and SIGTERM, as a shell has it


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(version("imagematrix"))
        raise typer.Exit


def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _app() -> typer.Typer:
    found = typer.Typer(
        name="imagematrix",
        help="Build one immutable image for each hardware configuration, and run the one that fits.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    found.callback()(_options)
    for name, module in {
        "init": init,
        "validate": validate,
        "plan": plan,
        "render": render,
        "build": build,
        "ls": ls,
        "probe": probe,
        "select": select,
        "explain": explain,
    }.items():
        found.command(name)(module.command)
    found.command("run", **launch.SETTINGS)(launch.command)
    return found


app = _app()


def run() -> int:
    """Run the command that the arguments name and return the exit code."""
    signal.signal(signal.SIGTERM, _terminated)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names from documents may hold what the terminal's encoding, or any, does not have.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except ImagematrixError as error:
        complain(error)
        return error.exit_code
    return 0


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    # Unwinds the stack, so that what was started is ended on the way.
    sys.exit(TERMINATED)
