"""Faults of Dockerfiles, at the places in templates where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from imagematrix.build.matrix.problems import Mark, Problem, format_with_excerpt
from imagematrix.common.files import read_stamp
from imagematrix.common.text import format_first
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from imagematrix.build.dockerfile.instructions import Fault
    from imagematrix.build.dockerfile.render import Origin

KEPT = 64  # templates


@dataclass(frozen=True, slots=True)
class TemplateFault:
    """A problem at a place of the template `where`, whose content is `text`, empty if it cannot be read."""

    where: str
    problem: Problem
    text: str

    def __str__(self) -> str:
        mark = self.problem.mark
        return f"{self.where}:{mark.line}:{mark.column}: {self.problem.message}"


class TemplateError(UsageError):
    """The Dockerfiles of templates have faults; `faults` are in the order of the templates."""

    def __init__(self, faults: Iterable[TemplateFault]) -> None:
        self.faults = tuple(
            sorted(
                faults, key=lambda fault: (fault.where, fault.problem.mark.line, fault.problem.mark.column)
            )
        )
        remedies = {fault.problem.remedy: None for fault in self.faults}
        super().__init__(*map(str, self.faults), remedy=next(iter(remedies)) if len(remedies) == 1 else None)

    @property
    def details(self) -> str:
        """The message with a remedy, unless all have the same, and an excerpt for each fault."""
        lines: list[str] = []
        texts = {text: text.splitlines() for text in {fault.text for fault in self.faults}}
        for fault in self.faults:
            problem = fault.problem
            if self.remedy:
                problem = Problem(problem.message, problem.mark)
            lines += format_with_excerpt(fault.where, problem, texts[fault.text])
        return "\n".join(lines)


@lru_cache(maxsize=KEPT)
def _read_template(path: Path, _stamp: tuple[int, ...] | None) -> tuple[str, list[str]]:
    """Return a template and its lines, none if it cannot be read; many cells may have faults of one."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        text = ""
    return text, text.split("\n")


def locate_faults(
    faults: Iterable[Fault], dockerfile: str, template: str, templates: Path, origins: Sequence[Origin]
) -> TemplateError:
    """Return the error for faults of a Dockerfile that `template` in the folder `templates` gave.

    `origins` has the origins of its lines; without them, lines are those of the Dockerfile.
    """
    located = []
    rendered = dockerfile.split("\n")
    for fault in faults:
        mark = fault.locate(dockerfile)
        if not origins:
            message = f"in line {mark.line} of a Dockerfile that it gives: {fault.message}"
            located.append(
                TemplateFault(str(templates / template), Problem(message, Mark(1, 1), fault.remedy), "")
            )
            continue
        name, number = origins[min(mark.line, len(origins)) - 1]
        path = templates / name
        text, lines = _read_template(path, read_stamp(path))
        line = lines[number - 1] if number <= len(lines) else ""
        column = _map_column(rendered[mark.line - 1], line, mark.column)
        problem = Problem(fault.message, Mark(number, column), fault.remedy)
        located.append(TemplateFault(str(path), problem, text))
    return TemplateError(located)


def merge_errors(errors: Mapping[str, TemplateError]) -> TemplateError:
    """Return one error for those of several cells, by the names of the cells."""
    cells: dict[TemplateFault, list[str]] = {}
    for cell, error in errors.items():
        for fault in error.faults:
            cells.setdefault(fault, []).append(cell)
    merged = []
    for fault, names in cells.items():
        problem = fault.problem
        message = f"{problem.message} (in {format_first(names, 'cell')})"
        merged.append(TemplateFault(fault.where, Problem(message, problem.mark, problem.remedy), fault.text))
    return TemplateError(merged)


def _map_column(rendered: str, source: str, column: int) -> int:
    """Return the column in a template's line `source` of a column in the line that it was rendered to."""
    end = len(rendered) - column + 1  # counted from the end of the line
    if rendered[:column] == source[:column]:
        return column
    if rendered[-end:] == source[-end:]:
        return len(source) - end + 1
    return len(source) - len(source.lstrip()) + 1
