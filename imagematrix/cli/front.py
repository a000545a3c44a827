"""The way in: how a command is found and called, and how an error ends it.

`select` and `run` are called on nodes, by jobs that wait for them, and to load typer takes longer than to
choose an image. So plain command lines of `select` are read here, by its own signature, and those of `run` as
they always are; typer reads all others, and says what is wrong with them.
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
# What stands between an answer and its file or pipe; such an error has no name of a file.
UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)
UNEXPECTED = 1
INTERRUPTED = 130  # 128 and SIGINT, as a shell has it
TERMINATED = 143  # 128 and SIGTERM


def run(words: Sequence[str]) -> int:
    """Run the command that the arguments name and return the exit code."""
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
    if error.errno != errno.EPIPE:  # where who reads has heard enough
        remedy = "make room where the answer goes, or where TMPDIR says"
        complain(ImagematrixError(f"can't write: {error.strerror}", remedy=remedy))
    return code or UNEXPECTED


def _code(words: Sequence[str]) -> tuple[int, OSError | None]:
    """Run a command, and return its exit code, and why its answer can't be written if it can't."""
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
    """Open what of stdin, stdout and stderr the caller has closed, on nothing.

    The next file that is opened would get its number, and what is said would be written there.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def plain(command: Callable[..., None], words: Sequence[str]) -> dict[str, Any] | None:
    """Return the parameters of `command` that a plain command line gives; None where typer has to read it.

    That is one with the argument and with options in full, each at most once if it is not REPEATABLE, its
    value in a word of its own. The first parameter is the argument; an option that is false by default has no
    value.
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
        app(words)(list(words))


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    # Unwinds the stack, so that what was started is ended on the way.
    sys.exit(TERMINATED)
