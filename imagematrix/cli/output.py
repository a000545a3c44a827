"""What the command line says: answers to stdout, everything for a person to stderr, colours on terminals."""

from __future__ import annotations

import os
import sys

from imagematrix import documents

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any, TextIO

    from rich.console import Console
    from rich.text import Text

    from imagematrix.errors import ImagematrixError

__all__ = ["answer", "complain", "console", "counted", "say", "say_raw", "show", "table", "visible", "warn"]

RED, YELLOW, DIM, PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[0m"
# What a terminal does not show but obeys: C0 and C1 controls (lines and tabs are meant), and what turns the
# direction of text, by which a line reads as another than it is.
OBEYED = (*range(9), *range(11, 32), *range(127, 160), 0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F))
CONTROLS = dict.fromkeys((*OBEYED, *range(0x2066, 0x206A)), "\N{REPLACEMENT CHARACTER}")
WIDE = 1_000  # columns of a table that nobody's terminal folds
WIDEST = 100_000  # of one with long words


def visible(text: str) -> str:
    """Return `text`, parts of which others have chosen, with nothing in it that a terminal obeys."""
    return text.translate(CONTROLS)


def say(text: str) -> None:
    """Tell a person something; that nobody can be told ends nothing."""
    say_raw(visible(text))


def say_raw(text: str) -> None:
    """Say what has control characters on purpose, and none of others."""
    if sys.stderr is None:  # it was closed before we began
        return
    try:
        sys.stderr.write(f"{text}\n")  # at once: builds speak from several threads
        sys.stderr.flush()
    except OSError:
        return


def show(text: str) -> None:
    """Print a line or several, the answer of a command."""
    print(visible(text))


def counted(number: int, noun: str) -> str:
    """Return "1 image" or "2 images"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def answer(document: object) -> None:
    """Print a JSON document, the answer of a command."""
    sys.stdout.write(documents.dump(document))


def complain(error: ImagematrixError) -> None:
    """Tell a person what went wrong and what would mend it."""
    _complain(RED, error.told, error.remedy)


def warn(text: str, remedy: str | None = None) -> None:
    """Tell a person what may be wrong, and what would mend it."""
    _complain(YELLOW, text, remedy)


def _complain(colour: str, text: str, remedy: str | None) -> None:
    start, dim, plain = (colour, DIM, PLAIN) if _coloured(sys.stderr) else ("", "", "")
    say_raw(f"{start}imagematrix:{plain} {visible(text)}")
    if remedy:
        say_raw(f"  {dim}{visible(remedy)}{plain}")


def console(stream: TextIO) -> Console:
    """Return a rich console for `stream`; where it is no terminal, lines are as long as they need to be."""
    from rich.console import Console

    class Visible(Console):
        """One that shows what is in text and obeys nothing."""

        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(visible(text), **options)

    return Visible(file=stream, highlight=False, width=None if stream.isatty() else WIDE, soft_wrap=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, stream: TextIO | None = None) -> None:
    """Print a table; a cell of a row may use rich's markup, so text of others goes through `escape` first.

    A column of words, such as references, keeps them in one piece however narrow the terminal is.
    """
    from rich.box import SIMPLE_HEAD
    from rich.measure import Measurement
    from rich.table import Table

    found = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    cells = list(rows)
    for number, name in enumerate(columns):
        words = all(" " not in row[number] for row in cells)
        found.add_column(name, overflow="fold", no_wrap=words)
    for row in cells:
        found.add_row(*row)
    made = console(stream or sys.stdout)
    widest = made.options.update(max_width=WIDEST)
    made.width = max(made.width, Measurement.get(made, widest, found).minimum)
    made.print(found)


def _coloured(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")
