"""What the command line says: answers to stdout, everything for a person to stderr, colours on terminals."""

from __future__ import annotations

import os
import sys

from imagematrix import documents

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import TextIO

    from rich.console import Console

    from imagematrix.errors import ImagematrixError

__all__ = ["answer", "complain", "console", "counted", "say", "table", "warn"]

RED, YELLOW, DIM, PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[0m"
WIDE = 1_000  # columns of a table that nobody's terminal folds


def say(text: str) -> None:
    """Tell a person something."""
    sys.stderr.write(f"{text}\n")  # at once: builds speak from several threads
    sys.stderr.flush()


def counted(number: int, noun: str) -> str:
    """Return "1 image" or "2 images"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def answer(document: object) -> None:
    """Print a JSON document, the answer of a command."""
    sys.stdout.write(documents.dump(document))


def complain(error: ImagematrixError) -> None:
    """Tell a person what went wrong and what would mend it."""
    _complain(RED, str(error), error.remedy)


def warn(text: str, remedy: str | None = None) -> None:
    """Tell a person what may be wrong, and what would mend it."""
    _complain(YELLOW, text, remedy)


def _complain(colour: str, text: str, remedy: str | None) -> None:
    start, dim, plain = (colour, DIM, PLAIN) if _coloured(sys.stderr) else ("", "", "")
    say(f"{start}imagematrix:{plain} {text}")
    if remedy:
        say(f"  {dim}{remedy}{plain}")


def console(stream: TextIO) -> Console:
    """Return a rich console for `stream`; where it is no terminal, lines are as long as they need to be."""
    from rich.console import Console

    return Console(file=stream, highlight=False, width=None if stream.isatty() else WIDE, soft_wrap=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, stream: TextIO | None = None) -> None:
    """Print a table; a cell of a row may use rich's markup, so text of others goes through `escape` first."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    found = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        found.add_column(name, overflow="fold")
    for row in rows:
        found.add_row(*row)
    console(stream or sys.stdout).print(found)


def _coloured(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")
