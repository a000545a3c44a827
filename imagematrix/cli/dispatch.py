"""The entry point: finds a command, calls it, and turns errors into exit codes.

`select`, `pull` and `run` are called on nodes, by jobs that wait for them, and `explain` by people who do.
Loading typer takes longer than choosing an image. So this module reads plain command lines of the commands in
PLAIN, according to their signatures, and `launcher.docker.options` reads those of `run`. Typer parses all
others, and reports errors in them.

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

from imagematrix.cli.shared.message_commands import OPTIONS, remember_parameters
from imagematrix.cli.shared.output import print_error, print_info_block
from imagematrix.errors import ImagematrixError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType, TracebackType
    from typing import Any

PLAIN = ("select", "explain", "pull")
REPEATABLE = frozenset({"where", "gang"})  # options that make a list
STDERR = 2
# Errors from writing the answer, if they name no file.
UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EBADF)
UNEXPECTED = 1
# 128 + the number of the signal, as in a shell.
HUNG_UP = 129
INTERRUPTED = 130
TERMINATED = 143
ENDED_BY_SIGNAL = (HUNG_UP, INTERRUPTED, TERMINATED)


def run_command(words: Sequence[str]) -> int:
    """Run the command that the arguments name, and return the exit code."""
    signal.signal(signal.SIGTERM, _handle_terminate)
    # A caller that ignores it, as `trap '' CHLD` does, would have the kernel forget how children ended.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, _handle_hangup)
    _open_streams()
    sys.excepthook = _print_bug
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names in documents may have characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    code, error = _run_guarded(words)
    try:
        sys.stdout.flush()
    except OSError as unwritten:
        error = error or unwritten
    if error is None:
        return code
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
    )  # otherwise Python reports it again at exit
    if error.errno != errno.EPIPE:  # for EPIPE, the reader has closed the pipe
        remedy = "free disk space where stdout goes, or set TMPDIR to another folder"
        if error.errno == errno.EBADF:
            remedy = "stdout is closed: send it to /dev/null if you do not want the answer"
        print_error(ImagematrixError(f"cannot write the answer: {error.strerror}", remedy=remedy))
    return code or UNEXPECTED


def _run_guarded(words: Sequence[str]) -> tuple[int, OSError | None]:
    """Run a command; return its exit code, and the error if its answer could not be written."""
    ends = signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    try:
        if ends:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        _call_command(words)
    except ImagematrixError as error:
        print_error(error)
        return error.exit_code, None
    except KeyboardInterrupt:
        return INTERRUPTED, None
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None), None
    except OSError as error:
        if error.filename is None and error.errno in UNWRITTEN:
            return UNEXPECTED, error
        raise
    finally:
        if ends:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    return 0, None


def _open_streams() -> None:
    """Open /dev/null in place of each of stdin, stdout and stderr that the caller has closed.

    Otherwise the next opened file would get that descriptor, and messages would be written to the file. In
    this process, writing an answer to a closed stdout is still an error; in a child it is not.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")  # noqa: PTH123, SIM115
    for descriptor, name in ((0, "stdin"), (STDERR, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def parse_plain_words(command: Callable[..., None], words: Sequence[str]) -> dict[str, Any] | None:
    """Return the parameters of `command` from a plain command line; None if typer must parse it.

    A plain line has the argument, and options with their full names, each value in a separate word; only
    REPEATABLE options occur more than once. The first parameter is the argument; an option that is false by
    default takes no value.
    """
    argument, *options = command.__code__.co_varnames[: command.__code__.co_argcount]
    defaults = dict(zip(options, command.__defaults__ or (), strict=True))
    names = {f"--{option.replace('_', '-')}": option for option in options}
    parameters: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        name = names.get(word, argument)
        switch = defaults.get(name) is False
        value = next(rest, "") if name in defaults and not switch else word
        if not value or value.startswith("-") != switch:
            return None
        if name in REPEATABLE:
            parameters.setdefault(name, []).append(value)
        elif name in parameters:
            return None
        else:
            parameters[name] = switch or value
    return parameters if argument in parameters else None


def _call_command(words: Sequence[str]) -> None:
    remember_parameters({})
    if words and words[0] in PLAIN:
        command = __import__(f"imagematrix.cli.{words[0]}", fromlist=["command"]).command
        parameters = parse_plain_words(command, words[1:])
        if parameters is not None:
            remember_parameters(parameters)
            command(**parameters)
            return
    if words[:1] == ["run"]:
        from imagematrix.launcher.docker.options import parse_run_args

        args = parse_run_args(words[1:])
        if args.image is not None and not args.is_help_requested:
            from imagematrix.cli.shared.run_docker import run_with_docker

            remember_parameters({name: getattr(args, name, None) for name in OPTIONS})
            sys.exit(run_with_docker(args, args.image))
    if words[:1] == ["oci-task"] and words[1:] not in (["-h"], ["--help"]):
        from imagematrix.cli.shared.slurm_task import run_slurm_task as start_task

        sys.exit(start_task(words[1:]))
    from imagematrix.cli.app import make_app
    from imagematrix.cli.shared.completion import enable_bash_completion

    with enable_bash_completion(os.environ):
        make_app(words)(list(words), prog_name="imagematrix")


def _print_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of a bug; the error in it may have text from others."""
    from traceback import format_exception

    print_info_block("".join(format_exception(kind, error, trace)).rstrip("\n"))


def _handle_terminate(_signal: int, _frame: FrameType | None) -> None:
    # Unwinds the stack, so that child processes are ended.
    sys.exit(TERMINATED)


def _handle_hangup(_signal: int, _frame: FrameType | None) -> None:
    """Exit as `_handle_terminate` does; what is still written to a closed terminal is lost without error."""
    for stream in range(STDERR + 1):
        try:
            os.tcgetpgrp(stream)
        except OSError as error:
            if error.errno == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    sys.exit(HUNG_UP)
