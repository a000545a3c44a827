"""The command line as typer reads it: all commands with their options."""

from __future__ import annotations

from typing import Annotated

import typer

from imagematrix.cli import (
    build,
    coverage,
    doctor,
    explain,
    export,
    gpus,
    init,
    launch,
    lock,
    ls,
    plan,
    probe,
    publish,
    render,
    report,
    schema,
    select,
    validate,
)
from imagematrix.cli.options import resolved

__all__ = ["app"]


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
        "lock": lock,
        "build": build,
        "report": report,
        "publish": publish,
        "export": export,
        "ls": ls,
        "probe": probe,
        "gpus": gpus,
        "doctor": doctor,
        "select": select,
        "explain": explain,
        "coverage": coverage,
        "schema": schema,
    }.items():
        found.command(name)(resolved(module.command))
    found.command("run", **launch.SETTINGS)(launch.command)
    return found


app = _app()
