"""Commands in messages, with the options of the running command that say what they are about.

A message such as "run `imagematrix lock`" is written where nobody knows that the matrix is another file. The
command line does, and there is one for each process, so it is kept here, and messages are completed when they
are printed.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# The parameters of commands that say which matrix, catalog or host a command is about, with their options.
OPTIONS = {
    "file": "-f",
    "catalog": "--catalog",
    "policy": "--policy",
    "host": "--host",
    "root": "--root",
    "nvidia_smi": "--nvidia-smi",
}
_parameters: dict[str, object] = {}  # of the running command


def remember_parameters(parameters: Mapping[str, object]) -> None:
    """Keep the parameters with which the running command was called, in place of all others."""
    _parameters.clear()
    _parameters.update((name, parameters[name]) for name in OPTIONS if parameters.get(name) is not None)


def repeat_options(text: str) -> str:
    """Add this command's options to those commands in backquotes in a message that take them, too."""
    if not _parameters or "`" not in text:
        return text
    parts = text.split("`")
    parts[1::2] = map(_complete_command, parts[1::2])
    return "`".join(parts)


def _complete_command(command: str) -> str:
    """Return a command of imagematrix with further options, and any other text unchanged."""
    from importlib import import_module
    from importlib.util import find_spec

    from imagematrix.common.text import quote_word
    from imagematrix.errors import sanitize_line

    program, name, *rest = *command.split(" "), ""
    module = name.replace("-", "_")
    accepted: tuple[str, ...] = ()  # parameters of the command, if there is one of this name
    if program == "imagematrix" and module.isidentifier() and find_spec(f"imagematrix.cli.{module}"):
        function = getattr(import_module(f"imagematrix.cli.{module}"), "command", None)
        if function:
            accepted = function.__code__.co_varnames[: function.__code__.co_argcount]
    options = [
        f"{option} {sanitize_line(quote_word(_parameters[parameter]))}"
        for parameter, option in OPTIONS.items()
        if parameter in _parameters and parameter in accepted and option not in rest
    ]
    return " ".join((command, *options))
