"""Output of the command line: answers to stdout, messages to stderr, colours on terminals."""

from __future__ import annotations

import contextlib
import os
import sys

from imagematrix.cli.shared.message_commands import repeat_options
from imagematrix.common import json_documents
from imagematrix.common.text import shorten_words
from imagematrix.errors import UsageError, sanitize_line, sanitize_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import Any, TextIO

    from rich.console import Console
    from rich.text import Text

    from imagematrix.errors import ImagematrixError


RED, YELLOW, DIM, PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[0m"
NAMED = 4  # names listed before "N more"
WIDTH = 100  # columns of paragraphs
WIDE = 1_000  # columns of output that does not go to a terminal
WIDEST = 100_000  # columns of a table with long words
GAP = " " * 3  # between two columns of a table


def print_info(text: str) -> None:
    """Print a message of one line to stderr; failing to do so is not an error."""
    print_info_raw(sanitize_line(repeat_options(text)))


def print_info_block(text: str) -> None:
    """Print text of several lines, such as a log, to stderr."""
    print_info_raw(sanitize_text(text))


def print_info_raw(text: str, end: str = "\n") -> None:
    """Print a message with intended control characters, and no others, to stderr."""
    if sys.stderr is None:  # closed by the caller
        return
    with contextlib.suppress(OSError):  # which is reported at the end
        sys.stdout.flush()  # an answer comes before the warnings about it, also where both go to one file
    try:
        sys.stderr.write(f"{text}{end}")  # in one call: builds print from several threads
        sys.stderr.flush()
    except OSError:
        return


def print_text(*lines: str) -> None:
    """Print lines of text, the answer of a command."""
    print("\n".join(map(sanitize_line, lines)))


def print_block(text: str) -> None:
    """Print text of several lines that only people read, such as the difference of two files."""
    print(sanitize_text(text))


def print_document(text: str, remedy: str = "remove them from the names and values that it has") -> None:
    """Print the answer of a command for another program, unchanged.

    Raises UsageError, with this `remedy`, if terminals or CI systems would act on a line of it.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if sanitize_text(line) != line:
            message = f"line {number} of the answer has words that terminals or CI systems obey: {line:.80}"
            raise UsageError(message, remedy=remedy)
    sys.stdout.write(text)


@contextlib.contextmanager
def report_write_errors(path: Path | None = None) -> Iterator[None]:
    """Raise UsageError if a file cannot be written: `path`, or else the file that the error names."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path or error.filename}: {error.strerror}") from error


def escape_text(text: str) -> str:
    """Return untrusted text as one line without control characters, and with rich's markup escaped."""
    from rich.markup import escape

    return escape(sanitize_line(text))


def format_names(names: Sequence[str]) -> str:
    """Return the first of these untrusted names and the number of the others, as text for print_lines."""
    return escape_text(shorten_words(names, NAMED, more=", {} more"))


def fold_paragraph(indent: str, text: str) -> list[str]:
    """Return the lines of a paragraph with this indent; further lines have two more blanks."""
    import textwrap

    return textwrap.wrap(
        sanitize_line(repeat_options(text)),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_lines(*lines: str) -> None:
    """Print lines, which may have rich's markup, the answer of a command; they are not folded."""
    make_console(sys.stdout).print("\n".join(map(sanitize_line, lines)), soft_wrap=True)


def print_json(document: object) -> None:
    """Print a JSON document, the answer of a command."""
    sys.stdout.write(json_documents.dump_json(document))


def print_error(error: ImagematrixError) -> None:
    """Print an error, whose lines are safe, and its remedy to stderr."""
    _print_with_remedy(RED, error.details, error.shown)


def warn(text: str, remedy: str | None = None) -> None:
    """Print a warning and its remedy to stderr."""
    _print_with_remedy(YELLOW, sanitize_line(text), remedy and sanitize_line(remedy))


def _print_with_remedy(colour: str, text: str, remedy: str | None) -> None:
    start, dim, plain = (colour, DIM, PLAIN) if _is_coloured(sys.stderr) else ("", "", "")
    print_info_raw(f"{start}imagematrix:{plain} {text}")
    if remedy:
        print_info_raw(f"  {dim}{repeat_options(remedy)}{plain}")


def make_console(stream: TextIO) -> Console:
    """Return a rich console for `stream`; without a terminal, lines are not folded."""
    from rich.console import Console

    class Visible(Console):
        """A console that replaces control characters."""

        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(sanitize_text(text), **options)

    return Visible(
        file=stream, highlight=False, width=None if stream.isatty() else WIDE, emoji=False, soft_wrap=False
    )


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | tuple[str, ...]]], *, stream: TextIO | None = None
) -> None:
    """Print a table; cells may have rich's markup, so pass text from others through `escape_text` first.

    A cell is one line, or a tuple of lines. A column of single words, such as references, is not folded,
    however narrow the terminal is.
    """
    screen = make_console(stream or sys.stdout)
    cells = [
        [
            sanitize_line(cell) if isinstance(cell, str) else "\n".join(map(sanitize_line, cell))
            for cell in row
        ]
        for row in rows
    ]
    unfolded = _format_unfolded(columns, cells, screen)
    if unfolded is None:
        _print_folded(columns, cells, screen)
    else:
        screen.print(unfolded, soft_wrap=True)


def _format_unfolded(columns: Sequence[str], rows: Sequence[Sequence[str]], screen: Console) -> Text | None:
    """Return a table that needs no folding; None if it does.

    rich takes a millisecond for each row, so tables of thousands of nodes are made here, with the same text.
    """
    from rich.text import Text

    if not rows or any("\n" in cell for row in rows for cell in row):
        return None
    cells = [
        [
            screen.render_str(cell) if "[" in cell or "\\" in cell else Text(sanitize_text(cell))
            for cell in row
        ]
        for row in (columns, *rows)
    ]
    widths = [max(cell.cell_len for cell in column) for column in zip(*cells, strict=True)]
    width = sum(widths) + len(GAP) * (len(columns) - 1)
    if width > screen.width:
        return None

    lines = []
    for row in cells:
        line = Text()
        for column, (cell, cell_width) in enumerate(zip(row, widths, strict=True)):
            line.append(GAP if column else "")
            line.append_text(cell)
            line.append(" " * (cell_width - cell.cell_len))
        lines.append(line)
    head, *body = lines
    head.stylize("bold")
    return Text("\n").join([head, Text("\u2500" * width), *body])


def _print_folded(columns: Sequence[str], rows: Sequence[Sequence[str]], screen: Console) -> None:
    """Print a table whose cells are folded where the terminal is too narrow for them."""
    from rich.box import SIMPLE_HEAD
    from rich.measure import Measurement
    from rich.table import Table

    grid = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column, name in enumerate(columns):
        single_words = all(" " not in row[column] for row in rows)
        grid.add_column(name, overflow="fold", no_wrap=single_words)
    for row in rows:
        grid.add_row(*row)
    widest = screen.options.update(max_width=WIDEST)
    screen.width = max(screen.width, Measurement.get(screen, widest, grid).minimum)
    screen.print(grid)


def _is_coloured(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")
