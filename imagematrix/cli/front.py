"""The entry point: finds a command, calls it, and turns errors into exit codes.

`select` and `run` are called on nodes, by jobs that wait for them, and loading typer takes longer than
choosing an image. So plain command lines of `select` are read here, by its own signature, and those of `run`
by `launcher.options`; typer reads all others, and reports what is wrong with them.

A whole `select` may take 6 times as long as `python -c pass`. In processor time, importing typer alone takes
5.7 times as long as that, and a `select` that typer reads 3 times as long as one read here. argparse would
add 1.1 times `pass` to a `select`, and typer would still have to read the other commands.
"""

from __future__ import annotations

import errno
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

REPEATABLE = frozenset({"where"})  # options that make a list
STDERR = 2
# Errors of writing the answer; they name no file.
UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)
UNEXPECTED = 1
INTERRUPTED = 130  # 128 and SIGINT, as a shell has it
TERMINATED = 143  # 128 and SIGTERM


def run(words: Sequence[str]) -> int:
    """Run the command that the arguments name, and return the exit code."""
    signal.signal(signal.SIGTERM, _terminated)
    _open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names from documents may hold what the terminal's encoding, or any, does not have.
        sys.stdout.reconfigure(errors="backslashreplace")
    code, error = _code(words)
    try:
        sys.stdout.flush()
    except OSError as unwritten:
        error = error or unwritten
    if error is None:
        return code
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more
    if error.errno != errno.EPIPE:  # the reader has closed the pipe
        remedy = "free some space where stdout goes, or set TMPDIR to another folder"
        complain(ImagematrixError(f"cannot write the answer: {error.strerror}", remedy=remedy))
    return code or UNEXPECTED


def _code(words: Sequence[str]) -> tuple[int, OSError | None]:
    """Run a command; return its exit code, and the error if its answer could not be written."""
    try:
        _call(words)
    except ImagematrixError as error:
        complain(error)
        return error.exit_code, None
    except KeyboardInterrupt:
        return INTERRUPTED, None
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None), None
    except OSError as error:
        if error.filename is None and error.errno in UNWRITTEN:
            return UNEXPECTED, error
        raise
    return 0, None


def _open_streams() -> None:
    """Open those of stdin, stdout and stderr that the caller has closed on /dev/null.

    Otherwise the next file to be opened would get such a number, and messages would be written to it.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def plain(command: Callable[..., None], words: Sequence[str]) -> dict[str, Any] | None:
    """Return the parameters of `command` that a plain command line gives; None where typer has to read it.

    A plain line has the argument, and options with their full names, each value in a word of its own; only
    REPEATABLE options occur more than once. The first parameter is the argument; an option that is false by
    default takes no value.
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
        if not value or value.startswith("-") != switch:
            return None
        if name in REPEATABLE:
            given.setdefault(name, []).append(value)
        elif name in given:
            return None
        else:
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
        from imagematrix.launcher.options import split

        asked = split(words[1:])
        if asked.image is not None and not asked.help:
            from imagematrix.cli.starting import start

            sys.exit(start(asked, asked.image))
    from imagematrix.cli.app import app
    from imagematrix.cli.completing import answering

    with answering(os.environ):
        app(words)(list(words), prog_name="imagematrix")


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    # Unwinds the stack, so that what was started is ended on the way.
    sys.exit(TERMINATED)
