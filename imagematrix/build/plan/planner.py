"""Planning: the steps from a matrix to what a build would do for each of its cells, in their order.

Cells are rendered here, identified (`cell_inputs`), and compared with existing images (`comparison`).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial

from imagematrix.build.dockerfile import dockerfile as dockerfiles
from imagematrix.build.dockerfile.cache_folders import find_cache_faults
from imagematrix.build.dockerfile.instructions import DockerfileError
from imagematrix.build.dockerfile.render import Renderer, complete_dockerfile
from imagematrix.build.dockerfile.template_error import TemplateError, locate_faults, merge_errors
from imagematrix.build.matrix.expand import expand_matrix, select_cells, select_platforms
from imagematrix.build.matrix.feasibility import find_infeasibility
from imagematrix.build.plan import driver, flags
from imagematrix.build.plan.cell_inputs import InputFinder, RenderedCell
from imagematrix.build.plan.comparison import StoreComparison
from imagematrix.build.plan.plan import Dropped, DropStatus, Plan, Planned, get_full_name
from imagematrix.build.trim import program
from imagematrix.common.suggestions import suggest_nearest
from imagematrix.errors import EngineError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from imagematrix.build.dockerfile.instructions import Fault
    from imagematrix.build.matrix.expand import Expansion
    from imagematrix.build.matrix.matrix import Cell, Matrix
    from imagematrix.build.plan.plan import PlanContext

    # Returns the cells of an expansion that no host needs, by image and id, each with the nearest host.
    FindSkippedCells = Callable[[Matrix, Expansion], Mapping[tuple[str, str], str]]

CONTEXTS = frozenset((program.CONTEXT, driver.CONTEXT))
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
        skipped = find_skipped(matrix, inputs.read_compat(expansion)) if find_skipped else {}
        if platforms:
            expansion = select_platforms(expansion, platforms)
        if expression:
            expansion = select_cells(expansion, expression, matrix)
        expansion = inputs.read_compat(expansion)
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
        self._inputs = inputs
        self._comparison = comparison
        self._template_errors: dict[str, TemplateError] = {}  # by image and cell
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
        if self._template_errors:
            raise merge_errors(self._template_errors)

        for cell, infeasible in verdicts:
            key = cell.image.name, cell.id
            if infeasible:
                rule, why = infeasible.rule, infeasible.why
                yield Dropped(cell=cell, status=DropStatus.INFEASIBLE, rule=rule, why=why)
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
        rendered = self._render_cell(cell)
        identified = self._inputs.identify_cell(rendered)
        return self._comparison.compare(identified)

    def _render_cell(self, cell: Cell) -> RenderedCell:
        """Render a cell; raise TemplateError, and keep it, if its Dockerfile has faults."""
        rendering = self._renderer.render(cell, partial(self._resolve_own_image, cell))
        cause: DockerfileError | None = None
        try:
            text = complete_dockerfile(rendering.text, cell, self._inputs.build_inputs.args)
            images = dockerfiles.list_bases(text)
            faults = dockerfiles.find_fixed_vectors(text)
            if cell.image.context is None:
                faults += self._find_missing_sources(cell, text)
            if cell.image.warm_up:
                faults += find_cache_faults(text)
        except DockerfileError as error:
            cause, text, images = error, error.dockerfile, ()
            faults = [
                *error.faults,
                *dockerfiles.find_faults(text),
                *dockerfiles.find_fixed_vectors(text),
            ]
            with contextlib.suppress(UsageError):  # of a context that cannot be read
                faults += self._find_missing_sources(cell, text)
        if faults:
            located = self._locate_faults(cell, rendering.text, text, faults)
            self._template_errors[get_full_name(cell)] = located
            raise located from cause
        needs = {reference: self._planned[name, cell.id] for name, reference in rendering.images.items()}
        contexts = CONTEXTS.intersection(images)
        names = tuple(name for name in images if name not in contexts)
        source_error = self._find_source_error(cell, rendering.text, text)
        return RenderedCell(cell, text, names, contexts, needs, source_error)

    def _find_source_error(
        self, cell: Cell, template_output: str, text: str
    ) -> EngineError | UsageError | None:
        """Return the error if a build would not find a file, or nobody knows the flags of a march."""
        try:
            flags.require_flag_source(cell, text)
            missing = self._find_missing_sources(cell, text)
            return self._locate_faults(cell, template_output, text, missing) if missing else None
        except (EngineError, UsageError) as error:  # fails only the cells with this flag or file
            return error

    def _find_missing_sources(self, cell: Cell, text: str) -> list[Fault]:
        """Return the faults of paths that a Dockerfile copies; raise UsageError for an unreadable context."""
        files = self._inputs.find_files(cell.image.context)
        return dockerfiles.find_missing_sources(
            text, files.find_complaint, [flags.STAGE] if "march" in cell.axes else []
        )

    def _locate_faults(
        self, cell: Cell, template_output: str, text: str, faults: Iterable[Fault]
    ) -> TemplateError:
        """Return the error for faults of a Dockerfile, which was completed from its template's output."""
        origins = self._renderer.find_origins(cell, partial(self._resolve_own_image, cell), template_output)
        folder = self._renderer.folder
        return locate_faults(dict.fromkeys(faults), text, cell.image.template, folder, origins)

    def _resolve_own_image(self, cell: Cell, name: str) -> str:
        """Return the reference of the image `name` of the same cell, which is planned first."""
        if name not in self._images:
            remedy = suggest_nearest(name, self._images) or f"it has {', '.join(self._images)}"
            raise UsageError(f"{cell.image.template}: the matrix has no image {name!r}", remedy=remedy)
        return self._plan_cell(replace(cell, image=self._images[name])).reference
