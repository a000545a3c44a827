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

    def sets(self, fact: str, key: Callable[[ValueClass], Key]) -> dict[Key, int]:
        """Return the combinations by what a function returns for their value class of a fact."""
        found: dict[Key, int] = {}
        members, stride = self._first(fact), self.strides[fact]
        for value in map(key, self.value_classes[fact]):
            found[value] = found.get(value, 0) | members
            members <<= stride
        return found

    def where(self, fact: str, holds: Callable[[ValueClass], bool]) -> int:
        """Return the combinations whose value class of a fact meets a condition; none for other facts."""
        return self.sets(fact, holds).get(True, 0) if fact in self.value_classes else 0

    def parts(self, sets: Iterable[int]) -> dict[int, tuple[Part, ...]]:
        """Return each of some sets as the products of conditions that together contain it."""
        distinct = list(dict.fromkeys(sets))
        # Products are searched in what is left when value classes that no set tells apart are one value.
        groups = {fact: self._groups(fact, distinct) for fact in self.value_classes}
        widths = [len(some) for some in groups.values()]
        firsts = {
            cell: sum(
                some[value][0] * self.strides[fact]
                for value, (fact, some) in zip(cell, groups.items(), strict=True)
            )
            for cell in product(*map(range, widths))
        }
        return {
            members: tuple(
                {
                    fact: tuple(
                        self.value_classes[fact][index] for value in sorted(values) for index in some[value]
                    )
                    for (fact, some), values in zip(groups.items(), box, strict=True)
                    if len(values) < len(some)
                }
                for box in find_hyperrectangles(
                    {cell for cell, first in firsts.items() if members >> first & 1}, widths
                )
            )
            for members in distinct
        }

    @cached_property
    def strides(self) -> dict[str, int]:
        """For each fact, the distance between combinations that differ only by one value class of it."""
        widths = [len(value_classes) for value_classes in self.value_classes.values()]
        return {fact: prod(widths[index + 1 :]) for index, fact in enumerate(self.value_classes)}

    def _first(self, fact: str) -> int:
        """Return the combinations with a fact's first value class: as many bits as its stride, repeated."""
        stride = self.strides[fact]
        # As 999999 // 999 is 1001: one bit for each run of all value classes.
        repeated = self.everything // ((1 << stride * len(self.value_classes[fact])) - 1)
        return repeated * ((1 << stride) - 1)

    def _groups(self, fact: str, sets: list[int]) -> list[list[int]]:
        """Return the indices of a fact's value classes, grouped where no set distinguishes them."""
        stride, first = self.strides[fact], self._first(fact)
        groups: dict[tuple[int, ...], list[int]] = {}
        for index in range(len(self.value_classes[fact])):
            groups.setdefault(tuple(members >> index * stride & first for members in sets), []).append(index)
        return [*groups.values()]


def find_intervals(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last number of each run of consecutive numbers; the input is sorted."""
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        some = [number for _, number in run]
        yield some[0], some[-1]


def find_hyperrectangles(cells: AbstractSet[Cell], widths: Sequence[int]) -> tuple[Box, ...]:
    """Return products that together contain exactly the given cells; none can be enlarged.

    The values of fact i are the numbers below `widths[i]`. The order is that of the least values.
    """
    found = dict.fromkeys(_grow_hyperrectangle(box, cells, widths) for box in _split_cells(cells))
    return tuple(sorted(found, key=lambda box: [sorted(values) for values in box]))


def _split_cells(cells: AbstractSet[Cell]) -> Iterator[Box]:
    """Yield products for the values of the first fact that have the same, or more, combinations."""
    rows: dict[int, set[Cell]] = {}
    if () in cells:
        yield ()
        return
    for first, *rest in cells:
        rows.setdefault(first, set()).add((*rest,))
    for some in {frozenset(row): None for row in rows.values()}:
        # Boxes may overlap: a value that has more combinations takes part in those of fewer, too.
        values = frozenset(value for value, row in rows.items() if row >= some)
        yield from ((values, *box) for box in _split_cells(some))


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
