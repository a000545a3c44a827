"""Text from others, made harmless for terminals and reports."""

from __future__ import annotations

import re

__all__ = ["headline", "plain"]

ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # colours and cursor movements (ECMA-48, 5.4)
# Characters that XML 1.0 excludes (production 2), and other controls, which move a terminal's cursor.
CONTROLS = re.compile("[^\\t\\n\\x20-\\x7e\\xa0-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")


def headline(error: str) -> str:
    """Return an error in one line: its last, in which builds report the cause."""
    return next((line.strip() for line in reversed(plain(error).split("\n")) if line.strip()), "failed")


def plain(text: str) -> str:
    """Return `text` without escape sequences; other control characters become replacement characters."""
    lines = ESCAPES.sub("", text.replace("\r\n", "\n"))
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", lines)
