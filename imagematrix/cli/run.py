"""The help of `imagematrix run`; imagematrix.cli.dispatch handles all other calls of it."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from imagematrix.cli.shared.completion import complete_run_words
from imagematrix.cli.shared.output import escape_text, make_console
from imagematrix.launcher.docker.options import OWN

EXAMPLE = "imagematrix run --gpus 1 registry.example.com/ml/training:v1 python3 train.py"
# typer parses none of the words: most options are docker's, and -h is one of them.
SETTINGS: dict[str, Any] = {
    "context_settings": {"ignore_unknown_options": True, "allow_interspersed_args": False},
    "add_help_option": False,
    "options_metavar": "[OPTIONS]",
}


def command(
    context: typer.Context,
    words: Annotated[  # noqa: ARG001
        list[str] | None,
        typer.Argument(metavar="IMAGE[:VERSION] [COMMAND...]", autocompletion=complete_run_words),
    ] = None,
) -> None:
    """Run the variant that fits this node best, with the device nodes of its GPUs and nothing else.

    Before the image, every option of `docker run` works, and so do the options below.
    """
    from rich.panel import Panel
    from rich.table import Table

    print(context.get_help().rstrip())
    options = Table.grid(padding=(0, 2))
    for name, (value, text) in OWN.items():
        options.add_row(f"[bold cyan]{name}[/]", f"[bold yellow]{value or ''}[/]", escape_text(text))
    make_console(sys.stdout).print(
        Panel.fit(options, title="Options", title_align="left", border_style="dim")
    )
