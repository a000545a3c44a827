"""Where the values of a cell stand in matrix.yaml: its axes, and the properties that they give it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from imagematrix.build.matrix.document import Mapping, Scalar, Sequence, parse_yaml

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.build.matrix.document import Node
    from imagematrix.build.matrix.matrix import Cell, Include, Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSource:
    """One place that gives a cell the value `text` for `name`: a line of the matrix, and what it is part of.

    It is not `used` if a later one gives the property another value.
    """

    name: str
    text: str
    part: str
    line: int
    used: bool = True

    def to_json(self) -> dict[str, object]:
        """Return one element of the Cell document's `values`."""
        return {
            "name": self.name,
            "value": self.text,
            "part": self.part,
            "line": self.line,
            "used": self.used,
        }


def list_value_sources(matrix: Matrix, cell: Cell) -> tuple[ValueSource, ...]:
    """Return the sources of all values of a cell, in the order in which they replace each other."""
    root = parse_yaml(matrix.text, str(matrix.path))
    properties = [*_list_properties(matrix, cell, root)]
    last = {source.name: source for source in properties}
    return (
        *_list_axes(cell, root),
        *(replace(source, used=last[source.name] is source) for source in properties),
    )


def _list_axes(cell: Cell, root: Node) -> Iterator[ValueSource]:
    for axis, value in cell.axes.items():
        words = _get_node(root, "axes", axis)
        items = words.items if isinstance(words, Sequence) else [words]
        lines = [item.mark.line for item in items if isinstance(item, Scalar) and item.text == value]
        if lines:
            yield ValueSource(name=axis, text=value, part="axes", line=lines[0])
        else:  # a value of the entry that added the cell
            line = _get_line(_find_entry(root, cell.includes[0]), axis)
            yield ValueSource(name=axis, text=value, part="include", line=line)


def _list_properties(matrix: Matrix, cell: Cell, root: Node) -> Iterator[ValueSource]:
    for axis, value in cell.axes.items():
        texts = matrix.get_properties(axis, value)
        # The value itself, or the glob that covers it.
        key = next((key for key, own in matrix.properties.get(axis, {}).items() if own is texts), value)
        for name, text in texts.items():
            line = _get_line(_get_node(root, "properties", axis, key), name)
            yield ValueSource(name=name, text=text, part=f"properties of {axis} {key}", line=line)
    for include in cell.includes:
        entry = _find_entry(root, include)
        for name, text in include.properties.items():
            yield ValueSource(name=name, text=text, part="include", line=_get_line(entry, name))


# The tree is of the text that the matrix was read from, so its nodes have the types that were read.


def _get_node(root: Node, *keys: str) -> Node:
    """Return the node to which `keys` lead, each in a map."""
    node = root
    for key in keys:
        node = cast("Mapping", node).entries[key][1]
    return node


def _find_entry(root: Node, include: Include) -> Node:
    entries = cast("Sequence", _get_node(root, "include")).items
    return next(entry for entry in entries if entry.mark == include.mark)


def _get_line(node: Node, key: str) -> int:
    return cast("Mapping", node).entries[key][0].line
