"""Errors in a matrix with their positions. All errors in a file are reported at once."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.errors import UsageError, sanitize_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH = 100  # characters of a line in an excerpt


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a file: line and column, both from 1."""

    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Problem:
    """One error: message, position, and remedy."""

    message: str
    mark: Mark
    remedy: str | None = None


class MatrixError(UsageError):
    """The matrix is invalid. `problems` are in the order of the file; `text` is its content, if known."""

    def __init__(self, where: str, problems: Sequence[Problem], text: str = "") -> None:
        ordered = sorted(problems, key=lambda problem: (problem.mark.line, problem.mark.column))
        super().__init__(*(line for problem in ordered for line in format_problem(where, problem)))
        self.where = where
        self.problems = tuple(ordered)
        self.text = text

    @property
    def details(self) -> str:
        """The message with an excerpt of the file for each problem."""
        lines = self.text.splitlines()
        return "\n".join(
            line for problem in self.problems for line in format_with_excerpt(self.where, problem, lines)
        )


def format_problem(where: str, problem: Problem) -> list[str]:
    """Return the lines that tell of a problem in the file `where`."""
    position = f"{where}:{problem.mark.line}:{problem.mark.column}: {problem.message}"
    return [position, f"  {problem.remedy}"] if problem.remedy else [position]


def format_with_excerpt(where: str, problem: Problem, lines: Sequence[str]) -> list[str]:
    """Return the lines that tell of a problem, with an excerpt of the file's `lines`."""
    parts = [*map(sanitize_line, format_problem(where, problem))]
    if 0 < problem.mark.line <= len(lines):
        # The part of the line around the position, with a caret below the position.
        start = max(0, problem.mark.column - 1 - WIDTH // 2)
        shown = sanitize_line(lines[problem.mark.line - 1][start : start + WIDTH].replace("\t", " "))
        number = f"{problem.mark.line:>5}"
        parts.append(f"{number} | {shown}".rstrip())
        parts.append(f"{' ' * len(number)} | {' ' * (problem.mark.column - 1 - start)}^")
    return parts
