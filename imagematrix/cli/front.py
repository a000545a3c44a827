"""The way in: how a command is found and called, and how an error ends it.

`select` and `run` are called on nodes, by jobs that wait for them, and to load typer takes longer than to
choose an image. So plain command lines of `select` are read here, by its own signature, and those of `run` as
they always are; typer reads all others, and says what is wrong with them.
"""

from __future__ import annotations

import io
import os
import signal
import sys

from imagematrix.cli.output import complain
from imagematrix.errors import ImagematrixError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType
    from typing import Any

__all__ = ["plain", "run"]

UNEXPECTED = 1
INTERRUPTED = 130  # 128 and SIGINT, as a shell has it
TERMINATED = 143  # 128 and SIGTERM


def run(words: Sequence[str]) -> int:
    """Run the command that the arguments name and return the exit code."""
    signal.signal(signal.SIGTERM, _terminated)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names from documents may hold what the terminal's encoding, or any, does not have.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            _call(words)
        finally:
            print(end="", flush=True)
    except ImagematrixError as error:
        complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # who reads has heard enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNEXPECTED
    return 0


def plain(command: Callable[..., None], words: Sequence[str]) -> dict[str, Any] | None:
    """Return the parameters of `command` that a plain command line gives; None where typer has to read it.

    That is one with the argument and with options in full, each at most once, its value in a word of its own.
    The first parameter is the argument; an option that is false by default has no value.
    """
    argument, *options = command.__code__.co_varnames[: command.__code__.co_argcount]
    defaults = dict(zip(options, command.__defaults__ or (), strict=True))
    names = {f"--{option.replace('_', '-')}": option for option in options}
    given: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        name = names.get(word, argument)
        switch = defaults.get(name) is False
        value = next(rest, "") if name in defaults and not switch else word
        if name in given or not value or value.startswith("-") != switch:
            return None
        given[name] = switch or value
    return given if argument in given else None


def _call(words: Sequence[str]) -> None:
    if words[:1] == ["select"]:
        from imagematrix.cli.select import command

        given = plain(command, words[1:])
        if given is not None:
            command(**given)
            return
    if words[:1] == ["run"]:
        from imagematrix.launch.options import split

        asked = split(words[1:])
        if asked.image is not None and not asked.help:
            from imagematrix.cli.starting import start

            sys.exit(start(asked, asked.image))
    from imagematrix.cli.app import app

    app(words)(list(words))


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    # Unwinds the stack, so that what was started is ended on the way.
    sys.exit(TERMINATED)
