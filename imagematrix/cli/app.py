"""The command line as typer reads it: all commands with their options."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Annotated

import typer

from imagematrix.cli import completing
from imagematrix.cli.options import resolved

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COMMANDS", "app"]

# In the order of --help. Each is the function `command` of the module of its name.
COMMANDS = (
    "init",
    "validate",
    "plan",
    "render",
    "lock",
    "build",
    "report",
    "publish",
    "verify",
    "export",
    "ls",
    "probe",
    "gpus",
    "doctor",
    "select",
    "explain",
    "coverage",
    "schema",
    "run",
)


def app(words: Sequence[str] = ()) -> typer.Typer:
    """Return the command line; where the first of `words` is a command, with that one alone.

    The words may also be those of a line that a shell wants to complete.

    To load the others takes longer than many a command takes to answer.
    """
    found = typer.Typer(
        name="imagematrix",
        help="Build one immutable image for each hardware configuration, and run the one that fits.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    found.callback()(_options)
    asked = next(iter(words or completing.asked(os.environ)), None)
    for name in [asked] if asked in COMMANDS else COMMANDS:
        module = import_module(f"imagematrix.cli.{name}")
        found.command(name, **getattr(module, "SETTINGS", {}))(resolved(module.command))
    return found


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
