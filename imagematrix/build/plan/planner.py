"""Planning: the steps from a matrix to what a build would do for each of its cells, in their order.

Cells are rendered (`cell_renderer`), identified (`cell_inputs`), and compared with existing images
(`comparison`).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from imagematrix.build.dockerfile.render import Renderer
from imagematrix.build.dockerfile.template_error import TemplateError, merge_errors
from imagematrix.build.matrix.expand import expand_matrix, select_cells, select_platforms
from imagematrix.build.matrix.feasibility import find_infeasibility
from imagematrix.build.plan.cell_inputs import InputFinder
from imagematrix.build.plan.cell_renderer import CellRenderer
from imagematrix.build.plan.comparison import StoreComparison
from imagematrix.build.plan.plan import Dropped, DropStatus, Plan, Planned
from imagematrix.common.suggestions import suggest_nearest
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from imagematrix.build.matrix.expand import Expansion
    from imagematrix.build.matrix.matrix import Cell, Matrix
    from imagematrix.build.plan.plan import PlanContext

    # Returns the cells of an expansion that no host needs, by image and id, each with the nearest host.
    FindSkippedCells = Callable[[Matrix, Expansion], Mapping[tuple[str, str], str]]

DEEPEST = 100  # images of the matrix that build on each other


def plan(
    matrix: Matrix,
    against: PlanContext,
    *,
    expression: str | None = None,
    platforms: Collection[str] = (),
    find_skipped: FindSkippedCells | None = None,
) -> Plan:
    """Return what a build of `matrix` would do; `expression` selects cells as `--only` does.

    With `platforms`, such as linux/arm64, only cells for these are selected. Cells of `find_skipped` are
    only built if another image of the matrix builds on them. Neither selection plays a part in that.

    Raises TemplateError with the faults of all Dockerfiles, UsageError if a base image is missing in a frozen
    lock, or if no cell has one of the platforms.
    """
    names = [image.name for image in matrix.images]
    inputs = InputFinder(against, matrix.path.parent)
    comparison = StoreComparison(against, inputs.list_context)
    with Renderer(matrix.templates, names, matrix.property_names) as renderer:
        expansion = expand_matrix(matrix)
        skipped = find_skipped(matrix, expansion) if find_skipped else {}
        if platforms:
            expansion = select_platforms(expansion, platforms)
        if expression:
            expansion = select_cells(expansion, expression, matrix)
        planner = _Planner(matrix, renderer, inputs, comparison)
        items = comparison.reuse_earlier_versions(tuple(planner.plan_cells(expansion, skipped)))
    references = (item.reference for item in items if isinstance(item, Planned))
    return Plan(
        items=items,
        bases=inputs.bases,
        contexts=inputs.contexts,
        drivers=inputs.drivers,
        build_inputs=inputs.build_inputs,
        unresolved=inputs.unresolved,
        lost=tuple(sorted(comparison.lost.difference(references))),
    )


class _Planner:
    """Plans each cell once, after the images that it builds on: its template looks these up."""

    def __init__(
        self, matrix: Matrix, renderer: Renderer, inputs: InputFinder, comparison: StoreComparison
    ) -> None:
        self._images = {image.name: image for image in matrix.images}
        self._where = matrix.path
        self._renderer = renderer
        arguments = inputs.build_inputs.args
        self._cell_renderer = CellRenderer(renderer, arguments, inputs.find_files, self._plan_own_image)
        self._inputs = inputs
        self._comparison = comparison
        self._planned: dict[tuple[str, str], Planned] = {}
        self._unfinished: set[tuple[str, str]] = set()  # a cell, and the cells that it builds on

    def plan_cells(
        self, expansion: Expansion, skipped: Mapping[tuple[str, str], str]
    ) -> Iterator[Planned | Dropped]:
        """Yield the items of an expansion; raise TemplateError once it is known which of them have faults."""
        verdicts = [(cell, find_infeasibility(cell)) for cell in expansion.cells]
        needed = [
            cell
            for cell, infeasible in verdicts
            if not infeasible and (cell.image.name, cell.id) not in skipped
        ]
        self._renderer.announce(needed)
        for cell in needed:  # which shows the images below them
            with contextlib.suppress(TemplateError):
                self._plan_cell(cell)
        if self._cell_renderer.errors:
            raise merge_errors(self._cell_renderer.errors)

        for cell, infeasible in verdicts:
            key = cell.image.name, cell.id
            if infeasible:
                status, rule, why = DropStatus.INFEASIBLE, infeasible.rule, infeasible.why
                yield Dropped(cell=cell, status=status, rule=rule, why=why)
            elif key in skipped and key not in self._planned:
                host = skipped[key]
                why = f"no host would choose it; the nearest is {host}"
                status = DropStatus.UNNEEDED
                yield Dropped(cell=cell, status=status, rule=None, why=why, nearest_host=host)
            else:
                yield self._plan_cell(cell)
        for excluded in expansion.excluded:
            line = f"{self._where}:{excluded.rule.mark.line}"
            why_excluded = excluded.rule.why
            yield Dropped(cell=excluded.cell, status=DropStatus.EXCLUDED, rule=line, why=why_excluded)

    def _plan_cell(self, cell: Cell) -> Planned:
        """Return the plan of a feasible cell; raise UsageError if its image builds on itself."""
        key = cell.image.name, cell.id
        if key in self._unfinished:
            raise UsageError(f"the image {cell.image.name} builds on itself (in the cell {cell.id})")
        if key not in self._planned:
            if len(self._unfinished) == DEEPEST:
                raise UsageError(f"more than {DEEPEST} images build on each other (in the cell {cell.id})")
            self._unfinished.add(key)
            try:
                self._planned[key] = self._take_steps(cell)
            finally:
                self._unfinished.remove(key)
        return self._planned[key]

    def _take_steps(self, cell: Cell) -> Planned:
        """Return what a build would do for a cell."""
        rendered = self._cell_renderer.render_cell(cell)
        identified = self._inputs.identify_cell(rendered)
        return self._comparison.compare(identified)

    def _plan_own_image(self, cell: Cell, name: str) -> Planned:
        """Return the plan of the image `name` of the same cell, which is planned first."""
        if name not in self._images:
            remedy = suggest_nearest(name, self._images) or f"it has {', '.join(self._images)}"
            raise UsageError(f"{cell.image.template}: the matrix has no image {name!r}", remedy=remedy)
        return self._plan_cell(replace(cell, image=self._images[name]))
