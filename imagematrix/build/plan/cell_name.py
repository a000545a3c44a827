"""The name of one cell on the command line: as `plan` prints it, a tag or reference, or values of axes."""

from __future__ import annotations

import re
from heapq import nlargest

from imagematrix.build.matrix.expand import expand_matrix, select_cells
from imagematrix.build.plan.plan import get_full_name
from imagematrix.common.suggestions import suggest_nearest
from imagematrix.common.text import shorten_words
from imagematrix.errors import UsageError
from imagematrix.images.catalog.axis_conditions import ConditionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.build.matrix.expand import Expansion
    from imagematrix.build.matrix.matrix import Cell, Matrix

DIGEST = re.compile(r"-[0-9a-f]{12}\Z")  # the input digest at the end of a tag
CONDITION = re.compile("[=<>]")
WORDS = re.compile("[-: ]")  # between the words of a name
SHOWN = 4  # cells that a message names
COMPARED = 100  # cells with most words in common


def find_cell(matrix: Matrix, name: str) -> Cell:
    """Return the cell that `--why` names; raise UsageError if there is none, or more than one.

    A name is what `plan` prints for a cell, with or without the image; the tag or the reference of an image
    of the cell, whatever its input digest; or conditions as for `--only`. A cell that the matrix excludes is
    found by its name, and by conditions if they match no other.
    """
    expansion = expand_matrix(matrix)
    cells = _list_cells(expansion)
    found = _find_by_name(cells, name) or _find_by_name(cells, DIGEST.sub("", name))
    if not found and CONDITION.search(name):
        try:
            selected = select_cells(expansion, name, matrix)
        except ConditionError as error:
            raise UsageError(f"--why: {error}") from error
        found = [*selected.cells] or _list_cells(selected)
    if len(found) == 1:
        return found[0]

    namesakes = len(matrix.images) > 1
    names = [get_full_name(cell) if namesakes or not cell.id else cell.id for cell in found or cells]
    if found:
        listed = shorten_words(names, SHOWN, more=", {} more")
        remedy = "name one of them, or add conditions such as image=training or march=znver4"
        raise UsageError(f"--why: {len(found)} cells match {name[:80]!r}: {listed}", remedy=remedy)
    words = {*WORDS.split(name)}  # a similarity of 100,000 names takes many seconds, so few are compared
    near = nlargest(COMPARED, names, key=lambda other: len(words.intersection(WORDS.split(other))))
    remedy = suggest_nearest(name, near) or "`imagematrix plan` shows the cells"
    raise UsageError(f"--why: no cell matches {name[:80]!r}", remedy=remedy)


def format_condition(cell: Cell) -> str:
    """Return the conditions of `--only` that select a cell, and no other that is built."""
    return ",".join(f"{axis}={value}" for axis, value in {"image": cell.image.name, **cell.axes}.items())


def _list_cells(expansion: Expansion) -> list[Cell]:
    """Return the cells, also those that rules dropped, unless an include entry adds them again."""
    excluded = (item.cell for item in expansion.excluded)
    return list({(cell.image.name, cell.id): cell for cell in (*excluded, *expansion.cells)}.values())


def _find_by_name(cells: list[Cell], name: str) -> list[Cell]:
    return [cell for cell in cells if name in _list_names(cell)]


def _list_names(cell: Cell) -> tuple[str, ...]:
    """Return the names of a cell, without input digests."""
    tag = f"{cell.image.version}-{cell.id}"
    return (*filter(None, [cell.id]), get_full_name(cell), tag, f"{cell.image.name}:{tag}")
