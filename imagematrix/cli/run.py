"""The help of `imagematrix run`; imagematrix.cli.front has read the line already when it is to be run."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from imagematrix.cli.completing import run_words
from imagematrix.cli.output import console
from imagematrix.launcher.options import OWN

__all__ = ["SETTINGS", "command"]

# Every word is read by ourselves: most options are docker's, and -h is one of them.
SETTINGS: dict[str, Any] = {
    "context_settings": {"ignore_unknown_options": True, "allow_interspersed_args": False},
    "add_help_option": False,
    "options_metavar": "[OPTIONS]",
}


def command(
    context: typer.Context,
    words: Annotated[  # noqa: ARG001
        list[str] | None, typer.Argument(metavar="IMAGE[:VERSION] [COMMAND...]", autocompletion=run_words)
    ] = None,
) -> None:
    """Run the variant that fits this node best, with the device nodes of its GPUs and nothing else.

    Every option of `docker run` works before the image, and besides them those listed below.
    """
    from rich.markup import escape
    from rich.panel import Panel
    from rich.table import Table

    print(context.get_help().rstrip())
    options = Table.grid(padding=(0, 2))
    for name, (value, what) in OWN.items():
        options.add_row(f"[bold cyan]{name}[/]", f"[bold yellow]{value or ''}[/]", escape(what))
    console(sys.stdout).print(Panel.fit(options, title="Options", title_align="left", border_style="dim"))
