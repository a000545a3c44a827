"""Help and completion of `imagematrix run`; imagematrix.cli.dispatch handles all other calls of it."""

from __future__ import annotations

from inspect import Parameter, Signature, signature
from typing import Annotated, Any

import typer

from imagematrix.cli.shared.completion import complete_engine_where, complete_run_words
from imagematrix.common.settings import ENGINES
from imagematrix.launcher.docker.options import OWN

EXAMPLE = "imagematrix run --gpus 1 registry.example.com/ml/training:v1 python3 train.py"
# Most options are docker's, and -h is one of them.
SETTINGS: dict[str, Any] = {
    "context_settings": {
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["--help"],
    },
}
VALUES: dict[str, Any] = {"--where": complete_engine_where, "--engine": lambda: list(ENGINES)}


def command(
    context: typer.Context,
    words: Annotated[  # noqa: ARG001
        list[str],
        typer.Argument(metavar="IMAGE[:VERSION] [COMMAND...]", autocompletion=complete_run_words),
    ],
    **_: object,
) -> None:
    """Run the variant that fits this node best, with the device nodes of its GPUs and nothing else.

    Before the image, every option of `docker run` works, and so do the options below.
    """
    print(context.get_help().rstrip())


def _make_option(name: str, value: str | None, text: str) -> Parameter:
    """Return an option of `run` as a parameter, as typer reads it."""
    option = typer.Option(name, metavar=value, help=text, autocompletion=VALUES.get(name))
    return Parameter(
        name.removeprefix("--").replace("-", "_"),
        Parameter.KEYWORD_ONLY,
        default=None if value else False,
        annotation=Annotated[str | None if value else bool, option],
    )


# What reads the options when it runs needs to start faster than typer loads, so they are in a table.
*_ARGUMENTS, _REST = signature(command, eval_str=True).parameters.values()
_OPTIONS = [_make_option(name, value, text) for name, (value, text) in OWN.items()]
command.__signature__ = Signature([*_ARGUMENTS, *_OPTIONS])  # type: ignore[attr-defined]
