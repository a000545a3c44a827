"""What is wrong with a matrix, and where: every problem of a file is told at once."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["SLIP", "Mark", "MatrixError", "Problem", "nearest"]

SLIP = 0.75  # the likeness of two words that says that one of them was meant to be the other


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a file: line and column, both from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: what, where, and what would mend it."""

    message: str
    mark: Mark
    remedy: str | None = None


class MatrixError(UsageError):
    """A matrix that is not valid; `problems` are in the order of the file."""

    def __init__(self, where: str, problems: Sequence[Problem]) -> None:
        ordered = sorted(problems, key=lambda problem: (problem.mark.line, problem.mark.column))
        super().__init__("\n".join(_line(where, problem) for problem in ordered))
        self.where = where
        self.problems = tuple(ordered)


def _line(where: str, problem: Problem) -> str:
    text = f"{where}:{problem.mark.line}:{problem.mark.column}: {problem.message}"
    return f"{text}\n  {problem.remedy}" if problem.remedy else text


def nearest(word: str, known: Iterable[str], *, likeness: float = 0.5) -> str | None:
    """Return "did you mean 'x'?" for the known word nearest to `word`, or None where none is near.

    `likeness` is how near, from 0 to 1: where nothing else speaks for a slip, it had better be `SLIP`.
    """
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return f"did you mean {matches[0]!r}?" if matches else None
