"""`imagematrix help`: the help of a command, or a table of what its output means."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Annotated

import typer

from imagematrix import errors
from imagematrix.cli import app
from imagematrix.cli.dispatch import HUNG_UP, INTERRUPTED, TERMINATED
from imagematrix.cli.shared.output import escape_text, fold_paragraph, print_lines, print_table
from imagematrix.common.suggestions import require_known
from imagematrix.selection.gang.gang import NothingFitsAll
from imagematrix.selection.rules import RULES
from imagematrix.selection.selection import NothingFits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLE = "imagematrix help exit-codes"
SIGNALS = {
    HUNG_UP: "Terminated by SIGHUP: its terminal was closed.",
    INTERRUPTED: "Interrupted by SIGINT (Ctrl-C).",
    TERMINATED: "Terminated by SIGTERM.",
}


def list_exit_codes() -> Iterator[tuple[int, str, str]]:
    """Yield each exit code, the exception that the Python API raises, and the meaning."""
    names = (name for name in sorted(vars(errors)) if name.endswith("Error"))
    kinds = [*(getattr(errors, name) for name in names), NothingFitsAll, NothingFits]
    yield 0, "", "Done."
    for kind in sorted(kinds, key=lambda kind: int(kind.exit_code)):
        summary = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
        yield kind.exit_code, kind.__name__, "Any other error." if kind.exit_code == 1 else summary
    for code, text in SIGNALS.items():
        yield code, "", text


def list_rules() -> Iterator[tuple[str, str, str]]:
    """Yield the name of each rule, when it holds, and what happens otherwise, with sources."""
    for rule in RULES:
        module = import_module(f"imagematrix.selection.rules.{rule.name.replace('-', '_')}")
        _, _, text = " ".join((module.__doc__ or "").split()).partition(": ")
        holds, _, otherwise = text.partition(". ")
        yield rule.name, holds, otherwise


def _print_exit_codes() -> None:
    rows = [(str(code), escape_text(meaning)) for code, _, meaning in list_exit_codes()]
    print_table(("code", "meaning"), rows)


def _print_rules() -> None:
    print_lines("A variant fits a host if every rule that applies to it holds:")
    for name, holds, otherwise in list_rules():
        text = escape_text(f"{holds[:1].upper()}{holds[1:]}. {otherwise}")
        print_lines("", f"[bold]{name}[/]", *fold_paragraph("  ", text))


TOPICS = {"exit-codes": _print_exit_codes, "rules": _print_rules}


def _complete(context: typer.Context, incomplete: str) -> list[str]:
    """Return commands and topics; after the name of a group, its commands."""
    names = (*app.COMMANDS, *TOPICS)
    module = "imagematrix.cli"
    for word in context.params.get("words") or ():
        if word not in names or word in TOPICS:
            return []
        module = f"{module}.{word.replace('-', '_')}"
        names = getattr(import_module(module), "COMMANDS", ())
    return [name for name in names if name.startswith(incomplete)]


def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND...|TOPIC",
            help=f"A command, such as run or kubernetes labels, or one of {', '.join(TOPICS)}.",
            autocompletion=_complete,
        ),
    ] = None,
) -> None:
    """Show the help of a command, the meaning of exit codes, or the rules by which images are chosen."""
    named = words or []
    if named[:1]:
        require_known(named[0], [*app.COMMANDS, *TOPICS], "command or topic")
    if named[1:] and named[0] in TOPICS:
        raise errors.UsageError(f"{named[0]} is a topic, which takes no further word: {named[1]}")
    if show := TOPICS.get(" ".join(named)):
        show()
    else:
        app.make_app(named)([*named, "--help"], prog_name="imagematrix")
