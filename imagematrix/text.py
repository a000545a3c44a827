"""Text for people: made harmless for terminals and reports if others wrote it, and short if it is a list."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CONTROL", "REPLACED", "counted", "headline", "line", "plain", "shortened", "visible"]

# Characters that control a terminal: C0 and C1 controls except line breaks and tabs, and those that change
# the direction of text, which can disguise a line. Patterns are compiled when they are first used, because
# most text of `select` has none of these.
CONTROL = "[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
NO_XML = "[\ud800-\udfff\ufffe\uffff]"  # excluded from XML 1.0 (production 2), besides controls
ESCAPES = r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours and cursor movements (ECMA-48, 5.4)
REPLACED = "\N{REPLACEMENT CHARACTER}"


def visible(text: str) -> str:
    """Return `text`, which may come from others, with control characters replaced."""
    return text if text.isprintable() else re.sub(CONTROL, REPLACED, text)


def line(text: str) -> str:
    """Return `text` as one line: line breaks and tabs are replaced, too."""
    return re.sub(r"[\t\n]", REPLACED, visible(text))


def plain(text: str) -> str:
    """Return `text` without escape sequences and what reports in XML cannot have."""
    return re.sub(NO_XML, REPLACED, visible(re.sub(ESCAPES, "", text.replace("\r\n", "\n"))))


def headline(error: str) -> str:
    """Return an error in one line: its last, in which builds report the cause."""
    return next((line.strip() for line in reversed(plain(error).split("\n")) if line.strip()), "failed")


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return "1 image" or "2 images"; `plural` is the form of a noun that does not just take an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or f'{noun}s'}"


def shortened(words: Sequence[str], most: int, glue: str = ", ", more: str = " and {} more") -> str:
    """Return the first `most` of `words`, and how many there are besides, as `more` says it."""
    shown = glue.join(words[:most])
    return shown + more.format(len(words) - most) if len(words) > most else shown
