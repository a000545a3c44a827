"""The typer application: all commands with their options."""

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

# In the order of --help. Each is the function `command` in the module of that name.
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
    "trim",
    "adopt",
    "export",
    "ls",
    "probe",
    "gpus",
    "doctor",
    "select",
    "explain",
    "coverage",
    "resolver",
    "schema",
    "run",
)


def app(words: Sequence[str] = ()) -> typer.Typer:
    """Return the application; if the first of `words` is a command, with that command only.

    Loading the others takes longer than many commands run. For completion, the words come from the shell.
    """
    application = typer.Typer(
        name="imagematrix",
        help="Build one immutable image for each hardware configuration, and run the one that fits.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    application.callback()(_options)
    first = next(iter(words or completing.words(os.environ)), None)
    for name in [first] if first in COMMANDS else COMMANDS:
        module = import_module(f"imagematrix.cli.{name}")
        application.command(name, **getattr(module, "SETTINGS", {}))(resolved(module.command))
    return application


def _version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        print(version("imagematrix"))
        raise typer.Exit


def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass
