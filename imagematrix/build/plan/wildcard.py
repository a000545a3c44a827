"""One pattern with wildcards, matched in time that grows with its length times that of the text.

Python's regular expressions try one way after the other, which takes hours for `*a*a*a*a*a*a*a*a*b` and a
long name of letters a. This follows all ways at once, as the expressions of Go do (Thompson, "Regular
Expression Search Algorithm", 1968): a set of positions in the pattern, one bit for each.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

WITHIN = "*"  # any characters but /
ANY = "**"  # any characters but line breaks
FOLDERS = "**/"  # nothing, or any characters but line breaks that end with /
KEPT = 10_000  # steps that are remembered; names in a folder have most of theirs in common


class Wildcard:
    """A pattern of `parts`: the three wildcards, and regular expressions that match one character each.

    Raises re.error if an expression is invalid.
    """

    def __init__(self, parts: Sequence[str]) -> None:
        self._literals: dict[str, int] = {}  # characters, with the positions that they lead on from
        self._classes: list[tuple[int, re.Pattern[str]]] = []
        self._within = self._any = self._folders = 0  # positions that stay, and those that end at /
        self._skipped = self._empty = 0  # those that lead to the next, and to the one after it, as they are
        bit = 1
        for part in parts:
            if part in (WITHIN, ANY):
                self._skipped |= bit
                self._within |= bit if part == WITHIN else 0
                self._any |= bit if part == ANY else 0
            elif part == FOLDERS:
                self._skipped |= bit
                self._empty |= bit
                bit <<= 1
                self._any |= bit
                self._folders |= bit
            elif part == re.escape(part[-1]):
                self._literals[part[-1]] = self._literals.get(part[-1], 0) | bit
            else:
                self._classes.append((bit, re.compile(part, re.ASCII)))
            bit <<= 1
        self._start, self._end = self._follow_empty(1), bit
        literal = "".join(part[-1] if part == re.escape(part[-1]) else "\0" for part in parts)
        self._needle = max(literal.split("\0"), key=len)  # most names lack it, which is found out fastest
        self._characters: dict[str, tuple[int, int]] = {}
        self._steps: dict[tuple[int, str], int] = {}

    def matches(self, text: str) -> bool:
        """Whether the pattern matches all of `text`."""
        if self._needle not in text:
            return False
        positions = self._start
        for letter in text:
            positions = self._advance(positions, letter)
            if not positions:
                return False
        return bool(positions & self._end)

    def _advance(self, positions: int, letter: str) -> int:
        step = positions, letter
        if step not in self._steps:
            if len(self._steps) >= KEPT:
                self._steps.clear()
            moving, staying = self._find_transitions(letter)
            self._steps[step] = self._follow_empty((positions & moving) << 1 | positions & staying)
        return self._steps[step]

    def _find_transitions(self, letter: str) -> tuple[int, int]:
        """Return the positions from which a character leads to the next, and those where it may stay."""
        if letter not in self._characters:
            moving = self._literals.get(letter, 0) | (self._folders if letter == "/" else 0)
            moving |= sum(bit for bit, expression in self._classes if expression.fullmatch(letter))
            staying = (self._within if letter != "/" else 0) | (self._any if letter != "\n" else 0)
            self._characters[letter] = moving, staying
        return self._characters[letter]

    def _follow_empty(self, positions: int) -> int:
        """Return positions with those that they lead to without a character."""
        previous = 0
        while previous != positions:
            previous = positions
            positions |= (previous & self._skipped) << 1 | (previous & self._empty) << 2
        return previous
