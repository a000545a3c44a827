"""All combinations of the values of some facts, and sets of combinations as products of conditions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, product
from math import prod

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from typing import TypeVar

    from imagematrix.selection.needs.equivalence import ValueClass

    Part = Mapping[str, tuple[ValueClass, ...]]  # by fact; a fact that is left out may have any value
    Cell = tuple[int, ...]  # one value for each fact
    Box = tuple[frozenset[int], ...]  # a set of values for each fact
    Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """All combinations of the facts' value classes. A set of them is an integer, with a bit for each."""

    value_classes: Mapping[str, tuple[ValueClass, ...]]

    @cached_property
    def everything(self) -> int:
        """The set of all combinations."""
        return (1 << prod(map(len, self.value_classes.values()))) - 1

    def group_by(self, fact: str, key: Callable[[ValueClass], Key]) -> dict[Key, int]:
        """Return the combinations by what a function returns for their value class of a fact."""
        groups: dict[Key, int] = {}
        members, stride = self._select_first(fact), self.strides[fact]
        for value in map(key, self.value_classes[fact]):
            groups[value] = groups.get(value, 0) | members
            members <<= stride
        return groups

    def select(self, fact: str, holds: Callable[[ValueClass], bool]) -> int:
        """Return the combinations whose value class of a fact meets a condition; none for other facts."""
        return self.group_by(fact, holds).get(True, 0) if fact in self.value_classes else 0

    def split_into_products(self, sets: Iterable[int]) -> dict[int, tuple[Part, ...]]:
        """Return each set as the products of conditions that together contain it."""
        distinct = list(dict.fromkeys(sets))

        # Value classes of a fact that no set tells apart count as one value: far fewer combinations remain.
        groups: dict[str, list[list[int]]] = {}  # by fact, the indices of the value classes of each value
        for fact, value_classes in self.value_classes.items():
            stride, first = self.strides[fact], self._select_first(fact)
            by_members: dict[tuple[int, ...], list[int]] = {}
            for index in range(len(value_classes)):
                key = tuple(members >> index * stride & first for members in distinct)
                by_members.setdefault(key, []).append(index)
            groups[fact] = [*by_members.values()]
        widths = [len(values) for values in groups.values()]

        # The bit of the first combination in each cell stands for all combinations in it.
        bits = {
            cell: sum(
                values[value][0] * self.strides[fact]
                for value, (fact, values) in zip(cell, groups.items(), strict=True)
            )
            for cell in product(*map(range, widths))
        }
        products: dict[int, tuple[Part, ...]] = {}
        for members in distinct:
            boxes = find_hyperrectangles({cell for cell, bit in bits.items() if members >> bit & 1}, widths)
            products[members] = tuple(
                {
                    fact: tuple(
                        self.value_classes[fact][index] for value in sorted(side) for index in values[value]
                    )
                    for (fact, values), side in zip(groups.items(), box, strict=True)
                    if len(side) < len(values)
                }
                for box in boxes
            )
        return products

    @cached_property
    def strides(self) -> dict[str, int]:
        """For each fact, the distance between combinations that differ only by one value class of it."""
        widths = [len(value_classes) for value_classes in self.value_classes.values()]
        return {fact: prod(widths[index + 1 :]) for index, fact in enumerate(self.value_classes)}

    def _select_first(self, fact: str) -> int:
        """Return the combinations with a fact's first value class: as many bits as its stride, repeated."""
        stride = self.strides[fact]
        # As 999999 // 999 is 1001: one bit for each run of all value classes.
        repeated = self.everything // ((1 << stride * len(self.value_classes[fact])) - 1)
        return repeated * ((1 << stride) - 1)


def find_intervals(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last number of each run of consecutive numbers; the input is sorted."""
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        interval = [number for _, number in run]
        yield interval[0], interval[-1]


def find_hyperrectangles(cells: AbstractSet[Cell], widths: Sequence[int]) -> tuple[Box, ...]:
    """Return products that together contain exactly the given cells; none can be enlarged.

    The values of fact i are the numbers below `widths[i]`. The order is that of the least values. Products
    may overlap: the three cells (0, 0), (0, 1) and (1, 0) of a square are {0} x {0, 1} and {0, 1} x {0}.
    """
    boxes = dict.fromkeys(_grow_hyperrectangle(box, cells, widths) for box in _split_cells(cells))
    return tuple(sorted(boxes, key=lambda box: [sorted(values) for values in box]))


def _split_cells(cells: AbstractSet[Cell]) -> Iterator[Box]:
    """Yield products for the values of the first fact that have the same, or more, combinations."""
    rows: dict[int, set[Cell]] = {}
    if () in cells:
        yield ()
        return
    for first, *rest in cells:
        rows.setdefault(first, set()).add((*rest,))
    for row_cells in {frozenset(row): None for row in rows.values()}:
        # Boxes may overlap: a value that has more combinations takes part in those of fewer, too.
        values = frozenset(value for value, row in rows.items() if row >= row_cells)
        yield from ((values, *box) for box in _split_cells(row_cells))


def _grow_hyperrectangle(box: Box, cells: AbstractSet[Cell], widths: Sequence[int]) -> Box:
    """Return a product with all values that can be added to it, fact by fact."""
    for index, width in enumerate(widths):
        more = frozenset(
            value
            for value in range(width)
            if value in box[index]
            or all(cell in cells for cell in product(*box[:index], [value], *box[index + 1 :]))
        )
        box = (*box[:index], more, *box[index + 1 :])
    return box
