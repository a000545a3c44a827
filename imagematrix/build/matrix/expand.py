"""Expand a Matrix to its cells: the product of the axes, without excluded cells, with included ones.

Order and meaning are those of GitHub Actions: the last axis varies fastest; an exclude rule may name only
some axes; an include entry that matches cells adds its properties to them, and one that matches none adds
a cell.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace

from imagematrix.build.matrix.axis_values import MEMORY, parse_memory
from imagematrix.build.matrix.feasibility import find_infeasibility
from imagematrix.build.matrix.matrix import GPU_AXES, NO_CUDA, Cell
from imagematrix.build.matrix.problems import Mark, MatrixError, Problem
from imagematrix.common.text import shorten_words
from imagematrix.errors import UsageError
from imagematrix.images.catalog import axis_conditions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from imagematrix.build.matrix.matrix import Exclude, Image, Include, Matrix

SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedCell:
    """A cell that an exclude rule dropped, and the rule."""

    cell: Cell
    rule: Exclude


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """All cells of a matrix, in order: the kept cells, and the cells that rules dropped."""

    cells: tuple[Cell, ...]
    excluded: tuple[ExcludedCell, ...]


def expand_matrix(matrix: Matrix) -> Expansion:
    """Return the cells of `matrix`.

    Raises MatrixError if a rule drops no cell, if cells have the same id, or if `plain_pull` does not name
    one cell for each platform.
    """
    points = list(_generate_points(matrix.axes))
    kept_points, dropped = _apply_excludes(matrix, points)
    merged = _apply_includes(matrix, kept_points)
    cells = []
    excluded = []
    for image in matrix.images:
        cells += [_make_cell(matrix, image, point, entries) for point, entries in merged]
        excluded += [
            ExcludedCell(cell=_make_cell(matrix, image, point, ()), rule=rule) for point, rule in dropped
        ]
    _require_unique_ids(matrix, cells[: len(merged)])
    expansion = Expansion(cells=tuple(cells), excluded=tuple(excluded))
    for image in matrix.images:
        find_plain_pull_cells(matrix, expansion, image)
    return expansion


def select_cells(expansion: Expansion, expression: str, matrix: Matrix) -> Expansion:
    """Return the part of `expansion` that `--only` selects.

    `image` can be used like an axis. Raises ConditionError if the expression names an unknown axis or matches
    no value.
    """
    values = {**matrix.axes, "image": tuple(image.name for image in matrix.images)}
    # An include may have added values that no axis lists.
    for cell in expansion.cells:
        for axis, value in cell.axes.items():
            if value not in values[axis]:
                values[axis] += (value,)
    allowed_values = axis_conditions.match_axes(values, axis_conditions.parse_only(expression), "this matrix")

    def matches(cell: Cell) -> bool:
        point = {**cell.axes, "image": cell.image.name}
        return all(point.get(axis) in values for axis, values in allowed_values.items())

    return _filter_cells(expansion, matches)


def select_platforms(expansion: Expansion, platforms: Iterable[str]) -> Expansion:
    """Return the part of `expansion` for these platforms; raise UsageError if a cell has none of them."""
    platform_names = frozenset(platforms)
    existing = sorted({cell.platform for cell in expansion.cells})
    for unknown in sorted(platform_names.difference(existing)):
        remedy = f"it has {', '.join(existing)}"
        raise UsageError(f"--platform: this matrix has no cell for {unknown}", remedy=remedy)
    return _filter_cells(expansion, lambda cell: cell.platform in platform_names)


def _filter_cells(expansion: Expansion, is_kept: Callable[[Cell], bool]) -> Expansion:
    return replace(
        expansion,
        cells=tuple(cell for cell in expansion.cells if is_kept(cell)),
        excluded=tuple(item for item in expansion.excluded if is_kept(item.cell)),
    )


def find_plain_pull_cells(matrix: Matrix, expansion: Expansion, image: Image) -> dict[str, str]:
    """Return, by platform, the id of the cell that `plain_pull` of `image` names; empty if it is not set.

    Raises MatrixError if it does not name exactly one cell for each platform.
    """
    conditions = image.plain_pull
    if conditions is None:
        return {}
    by_platform: dict[str, list[str]] = {}
    for cell in expansion.cells:
        if cell.image.name == image.name and not find_infeasibility(cell):
            ids = by_platform.setdefault(cell.platform, [])
            if all(cell.axes.get(axis) in allowed for axis, allowed in conditions.matches.items()):
                ids.append(cell.id)

    problems = []
    for platform, ids in by_platform.items():
        if not ids:
            message = f"plain_pull names no cell for {platform}"
            remedy = "name one for each platform, such as march: [x86-64-v2, armv8-a]"
            problems.append(Problem(message, conditions.mark, remedy))
        elif len(ids) > 1:
            message = (
                f"plain_pull names {len(ids)} cells for {platform}: {shorten_words(ids, SHOWN, more=', …')}"
            )
            problems.append(Problem(message, conditions.mark, "add axes until only one cell is left"))
    if problems:
        raise MatrixError(str(matrix.path), problems, matrix.text)
    return {platform: cell for platform, (cell,) in by_platform.items()}


def _generate_points(axes: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Yield the product of the axes; CPU-only points have no GPU axes, and each is yielded once."""
    seen: set[tuple[str, ...]] = set()
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        if point.get("cuda") == NO_CUDA:
            for axis in GPU_AXES:
                point.pop(axis, None)
            key = tuple(point.values())
            if key in seen:
                continue
            seen.add(key)
        yield point


class _PointIndex:
    """Finds points by their values; a point with few equals is found without a look at all others."""

    def __init__(self, points: Sequence[Mapping[str, str]]) -> None:
        self._points = points
        self._places: dict[tuple[str, str], list[int]] = {}
        for place, point in enumerate(points):
            for item in point.items():
                self._places.setdefault(item, []).append(place)

    def find(self, matches: Mapping[str, Collection[str]]) -> list[int]:
        """Return the places of the points that have, for each axis of `matches`, one of its values."""
        if not matches:
            return [*range(len(self._points))]
        by_axis = (
            [self._places.get((axis, value), []) for value in values] for axis, values in matches.items()
        )
        fewest = min(by_axis, key=lambda places: sum(map(len, places)))
        return sorted(
            place
            for place in itertools.chain.from_iterable(fewest)
            if all(self._points[place].get(axis) in values for axis, values in matches.items())
        )


def _apply_excludes(
    matrix: Matrix, points: list[dict[str, str]]
) -> tuple[list[dict[str, str]], list[tuple[dict[str, str], Exclude]]]:
    """Return the kept points, and the others with the first rule that drops each; raise MatrixError."""
    index = _PointIndex(points)
    rule_by_place: dict[int, Exclude] = {}
    problems = []
    for rule in matrix.exclude:
        matching = index.find(rule.matches)
        fresh = [place for place in matching if place not in rule_by_place]
        rule_by_place.update(dict.fromkeys(fresh, rule))
        if not fresh:
            message = "drops nothing: earlier rules drop all it matches" if matching else "matches no cell"
            remedy = "remove it, or correct its conditions"
            problems.append(Problem(f"this exclude rule {message}", rule.mark, remedy))
    if problems:
        raise MatrixError(str(matrix.path), problems, matrix.text)
    kept_points = [point for place, point in enumerate(points) if place not in rule_by_place]
    return kept_points, [(points[place], rule_by_place[place]) for place in sorted(rule_by_place)]


def _apply_includes(
    matrix: Matrix, points: list[dict[str, str]]
) -> list[tuple[dict[str, str], list[Include]]]:
    index = _PointIndex(points)
    merged: list[tuple[dict[str, str], list[Include]]] = [(point, []) for point in points]
    added: list[tuple[dict[str, str], list[Include]]] = []
    for entry in matrix.include:
        matching = index.find({axis: (value,) for axis, value in entry.axes.items()})
        for place in matching:
            merged[place][1].append(entry)
        if matching:
            continue

        # It adds a point, which needs a value of each axis that applies to it.
        is_cpu_only = entry.axes.get("cuda") == NO_CUDA
        needed = [axis for axis in matrix.axes if not (is_cpu_only and axis in GPU_AXES)]
        missing = [axis for axis in needed if axis not in entry.axes]
        if missing:
            message = f"this entry matches no cell, and it lacks {', '.join(missing)} to add one"
            raise MatrixError(str(matrix.path), [Problem(message, entry.mark)], matrix.text)
        added.append(({axis: entry.axes[axis] for axis in needed}, [entry]))
    return [*merged, *added]


def _require_unique_ids(matrix: Matrix, cells: Sequence[Cell]) -> None:
    names = Counter(cell.id for cell in cells)
    problems = [
        Problem(
            f"{count} cells would have the name {name}",
            Mark(1, 1),
            "change a value of an axis (in names '/' is '-', and '+' is '_'),"
            " or remove the include entry that adds the cell again",
        )
        for name, count in names.items()
        if count > 1
    ]
    if problems:
        raise MatrixError(str(matrix.path), problems, matrix.text)


def _make_cell(matrix: Matrix, image: Image, point: dict[str, str], includes: Sequence[Include]) -> Cell:
    properties: dict[str, str] = {}
    for axis, value in point.items():
        properties.update(matrix.get_properties(axis, value))
    for entry in includes:
        properties.update(entry.properties)
    return Cell(
        image=image,
        axes=point,
        properties=properties,
        facts=matrix.facts,
        includes=tuple(includes),
        stated_memory_mib=_find_memory(matrix, image, point) if MEMORY in properties else image.memory_mib,
    )


def _find_memory(matrix: Matrix, image: Image, point: Mapping[str, str]) -> int | None:
    """Return the most memory that an image or a value states, in MiB."""
    texts = [matrix.get_properties(axis, value).get(MEMORY, "") for axis, value in point.items()]
    return max(filter(None, (image.memory_mib, *map(parse_memory, texts))), default=None)
