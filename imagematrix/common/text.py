"""Text for people: made harmless for terminals, CI systems and reports, and short if it is a list.

Values of matrices, hosts, catalogs, registries and file names come from others. They reach messages as parts
of lines, and each line of a message passes `sanitize_line`: in the constructor of the error, or where
it is printed. So that function is in the module of the errors, which uses no other.
"""

from __future__ import annotations

import re

from imagematrix.errors import REPLACED, sanitize_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

NO_XML = "[\ud800-\udfff\ufffe\uffff]"  # excluded from XML 1.0 (production 2), besides controls
# White space as Go has it, in which docker and BuildKit are written (unicode.IsSpace).
SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
ESCAPES = r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours and cursor movements (ECMA-48, 5.4)


def strip_escapes(text: str) -> str:
    """Return `text` without escape sequences and what reports in XML cannot have."""
    return re.sub(NO_XML, REPLACED, sanitize_text(re.sub(ESCAPES, "", text.replace("\r\n", "\n"))))


def make_headline(error: str) -> str:
    """Return an error in one line: its last, in which builds report the cause."""
    return next(
        (line.strip() for line in reversed(strip_escapes(error).split("\n")) if line.strip()), "failed"
    )


def format_count(number: int, noun: str, plural: str = "") -> str:
    """Return "1 image" or "2 images"; `plural` is the form of a noun that does not just take an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or f'{noun}s'}"


def format_first(names: Sequence[str], noun: str) -> str:
    """Return the first of `names`, and how many others there are: "cpu and 2 other cells"."""
    first, *rest = names
    return f"{first} and {format_count(len(rest), f'other {noun}')}" if rest else first


def shorten_words(words: Sequence[str], most: int, glue: str = ", ", more: str = " and {} more") -> str:
    """Return the first `most` of `words`, and how many there are besides, as `more` says it."""
    shown = glue.join(words[:most])
    return shown + more.format(len(words) - most) if len(words) > most else shown


def shorten_lines(
    lines: Sequence[str], most: int, *, more: str = "and {} more", indent: str = "  "
) -> list[str]:
    """Return the first `most` of `lines`, and one that says how many there are besides, for an error."""
    rest = [more.format(len(lines) - most)] if len(lines) > most else []
    return [f"{indent}{line}" for line in (*lines[:most], *rest)]


def format_csv_line(*fields: str) -> str:
    """Return fields as docker and buildx read them in an option, in which any may have commas and quotes."""
    import csv
    import io

    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


def quote_word(value: object) -> str:
    """Return a value as one word of a command that a message names: whoever pastes it runs nothing else."""
    import shlex  # needed only for errors

    return shlex.quote(str(value))
