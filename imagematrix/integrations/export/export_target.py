"""The interface of export targets, and the source that they export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from imagematrix.build.matrix.matrix import Cell
    from imagematrix.build.plan.protocols import BuildRequest


class ExportSource(Protocol):
    """The matrix to export. Its methods raise UsageError if it is invalid."""

    @property
    def expression(self) -> str:
        """The value of `--only`, which selects the cells; empty for all."""
        ...

    def list_cells(self) -> Sequence[Cell]:
        """Return the feasible cells, without an engine; the files of some may be missing on this machine."""
        ...

    def make_requests(self, find_source: Callable[[str], str]) -> Sequence[BuildRequest]:
        """Return the build requests for this machine's engine.

        `find_source` returns the source of an image that others build on, by its reference. Raises
        EngineError if no engine answers, and TagMovedError if a version would change.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportTarget:
    """A tool that a matrix is exported for: its name on the command line, and a short description.

    `files` returns the files by name, given the matrix and the requested number of jobs, or None.
    """

    name: str
    help: str
    files: Callable[[ExportSource, int | None], Mapping[str, str]]
