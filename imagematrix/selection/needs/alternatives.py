"""The ways for a node to fit a variant, apart from CPU flags: the verdicts of all rules as conditions."""

from __future__ import annotations

from functools import cached_property, lru_cache
from itertools import product

from imagematrix.hardware.vendors import gpus, versions
from imagematrix.selection.needs.equivalence import ValueClass
from imagematrix.selection.needs.grid import Grid, find_hyperrectangles, find_intervals
from imagematrix.selection.needs.need import Need
from imagematrix.selection.needs.verdicts import (
    DRIVER,
    GPUS,
    VERSION,
    JudgedGrid,
    UnsupportedConditionError,
    get_judge,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence
    from typing import Any

    from imagematrix.selection.needs.grid import Box, Part
    from imagematrix.selection.needs.verdicts import AppliedRule, Scope

    Condition = tuple[tuple[str, Any], ...]  # fields of a Need
    Row = tuple[int, ...]  # of a node in a table: the value classes of NODE_FACTS

ACCELERATORS, KIND, DIFFERS = NODE_FACTS = ("accelerators", "driver.kind", "driver.user_mode_differs")
LAST_BRANCH = "gpus.last_branch"
# Facts of which the least among all GPUs counts, with the field of a Need that has it.
BOUNDS = {LAST_BRANCH: "limit", "gpus.least_memory_mib": "memory_mib"}
LISTED = {"ok", "vgpu"}  # the states of GPUs that NVIDIA's software lists
ANY = ValueClass((), ())  # stands for all values of a fact that no rule compares


# How conditions are found. A node without its GPUs is described by NODE_FACTS and its driver, a GPU by the
# facts of GPUs. Rules tell only few values of each apart (see `equivalence`), so all combinations are tried:
#
#   driver:   none    [525, 550)    [550, 570)    …
#   row 1     {…}     {…}           {…}                a row for each combination of NODE_FACTS,
#   row 2     {…}     {…}           {…}                a set of combinations of GPU facts in each cell
#
# A cell is the AND of all rules' verdicts: an integer with a bit for each combination of GPU facts, and one
# more for a node without GPUs. Then the table is written down as few conditions: each cell as products of
# conditions on GPUs; all cells with the same product as conditions on the driver; and all rows with the same
# condition on the driver as conditions on the node.


@lru_cache(maxsize=1024)
def find_alternatives(rules: tuple[AppliedRule, ...], scope: Scope, *, listed: bool) -> tuple[Need, ...]:
    """Return the ways, in general or for `listed` GPUs; raise UnsupportedConditionError if there are none."""
    table = _make_table(rules, scope)
    return tuple(table.derive_needs(table.restrict_to_listed() if listed else table.rows))


# A table serves twice for each variant: in general, and for listed GPUs.
@lru_cache(maxsize=64)
def _make_table(rules: tuple[AppliedRule, ...], scope: Scope) -> _Table:
    return _Table(rules, scope)


class _Table:
    """The combinations of facts of GPUs with which each kind of node fits, for all rules together.

    The first of `_drivers` is None for no driver. The others are value classes: intervals, then the texts
    that rules compare with.
    """

    def __init__(self, rules: tuple[AppliedRule, ...], scope: Scope) -> None:
        self._rules, self._scope = rules, scope
        self._compared: dict[str, frozenset[Hashable]] = {}
        for rule in rules:
            for fact, values in rule.compared.items():
                self._compared[fact] = self._compared.get(fact, frozenset()) | values
        self._node = {fact: self._find_value_classes(fact) for fact in NODE_FACTS}
        driver = any(fact.startswith(DRIVER) for fact in self._compared)
        self._drivers = (None, *(self._find_value_classes(VERSION) if driver else ()))
        gpu_facts = [fact for fact in scope.vocabulary.scales if fact.startswith(GPUS)]
        self._grid = Grid(
            value_classes={
                fact: self._find_value_classes(fact) for fact in gpu_facts if fact in self._compared
            }
        )
        self._none = self._grid.everything + 1  # the bit for a node without GPUs
        self._everything = self._grid.everything | self._none

    def _find_value_classes(self, fact: str) -> tuple[ValueClass, ...]:
        compared = self._compared.get(fact)
        return (
            (ANY,) if compared is None else self._scope.vocabulary.scales[fact].make_value_classes(compared)
        )

    @cached_property
    def rows(self) -> dict[Row, list[int]]:
        """For each kind of node, the combinations that fit with each of the drivers."""
        grids = [JudgedGrid(get_judge(rule, self._scope), self._grid) for rule in self._rules]
        rows: dict[Row, list[int]] = {}
        for row in product(*(range(len(value_classes)) for value_classes in self._node.values())):
            node = {
                fact: value_classes[value]
                for (fact, value_classes), value in zip(self._node.items(), row, strict=True)
            }
            rows[row] = []
            for driver in self._drivers:
                # Without a driver, there are no facts of one.
                facts = node | {VERSION: driver} if driver else {ACCELERATORS: node[ACCELERATORS]}
                fits = self._everything
                for grid in grids:
                    fits &= grid.find_fitting(facts)
                    if not fits:
                        break
                rows[row].append(fits)
        return rows

    def restrict_to_listed(self) -> dict[Row, list[int]]:
        """Return the same for GPUs that are listed, whatever the kind of modules and the user-mode driver."""
        same = len(self._node[DIFFERS]) - 1  # the last of True and False
        rows: dict[Row, list[int]] = {}
        for (sign, kind, differs), sets in self.rows.items():
            if differs == same:
                # GPUs are listed only with modules that drive them: what other modules refuse does not count.
                samples = self._node[KIND][kind].samples
                undriven = self._select_undriven(samples[0] if samples else None)
                row = rows.setdefault((sign, 0, 0), [self._everything] * len(sets))
                rows[sign, 0, 0] = [
                    all_kinds & (fits | undriven) for all_kinds, fits in zip(row, sets, strict=True)
                ]
        return {
            row: [self._drop_unlisted(fits, driver) for fits, driver in zip(sets, self._drivers, strict=True)]
            for row, sets in rows.items()
        }

    def _select_undriven(self, modules: str | None) -> int:
        """Return the combinations with GPUs that a kind of kernel modules does not drive."""
        return self._grid.select(
            "gpus.compute", lambda value_class: not gpus.is_supported(modules, value_class.samples[0])
        )

    @cached_property
    def _unlisted(self) -> int:
        """The combinations with a state in which NVIDIA's software does not list a GPU."""
        return self._grid.select("gpus.state", lambda value_class: LISTED.isdisjoint(value_class.shown))

    @cached_property
    def _supported_by_newest(self) -> int:
        """The combinations with GPUs that the newest driver supports."""
        return self._grid.select(LAST_BRANCH, self._grid.value_classes[LAST_BRANCH][-1].__eq__)

    def _drop_unlisted(self, fits: int, driver: ValueClass | None) -> int:
        """Return combinations without GPUs that NVIDIA's software does not list with a driver.

        A branch that is the last for no GPU listed is treated as the next one that is.
        """
        if len(self._drivers) > 1 and driver is None:
            return fits & self._none
        fits &= ~self._unlisted
        if LAST_BRANCH not in self._grid.value_classes:
            return fits
        branch = versions.get_branch(driver.samples[0]) if driver and driver.samples else 0
        above = self._supported_by_newest
        result, next_listed = fits & (above | self._none), fits & above
        for limit in reversed(self._grid.value_classes[LAST_BRANCH][:-1]):
            # From the combinations with the next limit to those with this one.
            next_listed >>= self._grid.strides[LAST_BRANCH]
            # One of these branches is the last for some GPU, and the driver still supports it.
            first, last = limit.shown
            if any(max(first, branch) <= last_branch <= last for last_branch in gpus.list_last_branches()):
                next_listed &= fits
            result |= next_listed
        return result

    def derive_needs(self, table: dict[Row, list[int]]) -> Iterator[Need]:
        """Yield the conditions that a table consists of."""
        widths = [max(values) + 1 for values in zip(*table, strict=True)]
        gpu_sets = (fits & self._grid.everything for sets in table.values() for fits in sets)
        products = self._grid.split_into_products(gpu_sets)

        # The cells by their conditions on GPUs, so that nodes with the same ones share a Need.
        cells: dict[Hashable, tuple[bool | None, Part, dict[Row, list[bool]]]] = {}
        for row, sets in table.items():
            for driver, fits in enumerate(sets):
                for has_gpus, part in self._list_gpu_conditions(fits, products):
                    _, _, rows = cells.setdefault((has_gpus, *part.items()), (has_gpus, part, {}))
                    rows.setdefault(row, [False] * len(sets))[driver] = True

        for has_gpus, part, rows in cells.values():
            gpu_fields = dict(self._list_gpu_fields(part))
            rows_by_condition: dict[Condition, set[Row]] = {}
            for row, fitting in rows.items():
                for condition in self._list_driver_conditions(fitting):
                    rows_by_condition.setdefault(condition, set()).add(row)
            for condition, condition_rows in rows_by_condition.items():
                for box in find_hyperrectangles(condition_rows, widths):
                    fields = gpu_fields | dict(condition) | dict(self._list_node_fields(box, widths))
                    yield Need(arch=self._scope.arch, gpus=has_gpus, **fields)

    def _list_gpu_conditions(
        self, fits: int, products: dict[int, tuple[Part, ...]]
    ) -> Iterator[tuple[bool | None, Part]]:
        """Yield the conditions on GPUs, each with whether there have to be any."""
        if fits == self._everything:
            yield None, {}
            return
        if fits & self._none:
            yield False, {}
        yield from ((True, part) for part in products[fits & self._grid.everything])

    def _list_gpu_fields(self, part: Part) -> Iterator[tuple[str, Any]]:
        """Yield the fields of a Need about GPUs."""
        for fact, value_classes in part.items():
            if fact == "gpus.compute":
                spans = [value_class.shown for value_class in value_classes]
                yield (
                    "computes",
                    tuple(sorted(code for first, last in spans for code in range(first, last + 1))),
                )
            elif fact in BOUNDS:
                # The least of all GPUs decides: a condition includes all greater ones.
                if value_classes != self._grid.value_classes[fact][-len(value_classes) :]:
                    raise self._make_unsupported_error(fact)
                yield BOUNDS[fact], value_classes[0].shown[0]
            elif fact == "gpus.data_centre":
                if value_classes[0].shown != (True,):
                    raise self._make_unsupported_error(fact)
                yield "data_centre", True
            else:
                yield (
                    f"{fact.removeprefix(GPUS)}s",
                    tuple(sorted(name for value_class in value_classes for name in value_class.shown)),
                )

    def _list_driver_conditions(self, fitting: Sequence[bool]) -> Iterator[Condition]:
        """Yield the fields of a Need about the driver, from whether each of the drivers fits."""
        without_driver, *with_driver = fitting
        is_version_compared = VERSION in self._compared
        if len(self._drivers) == 1 or (not is_version_compared and without_driver and with_driver[0]):
            yield ()
            return
        if without_driver:
            yield (("loaded", False),)
        if is_version_compared:
            yield from self._list_version_conditions(with_driver)
        elif with_driver[0]:
            yield (("loaded", True),)

    def _list_version_conditions(self, fitting: Sequence[bool]) -> Iterator[Condition]:
        """Yield runs of intervals without the texts in them that do not fit, and further texts that do."""
        classes = [
            (*value_class.shown, fits)
            for value_class, fits in zip(self._drivers[1:], fitting, strict=True)
            if value_class
        ]
        spans = [(start, end, fits) for start, end, fits in classes if not isinstance(start, str)]
        texts = classes[len(spans) :]
        inside: set[str] = set()
        for first, last in find_intervals(index for index, (_, _, fits) in enumerate(spans) if fits):
            oldest, below = spans[first][0], spans[last][1]
            within = {
                text: fits
                for text, numbers, fits in texts
                if numbers and oldest <= numbers and (below is None or numbers < below)
            }
            inside |= within.keys()
            other_than = frozenset(text for text, fits in within.items() if not fits)
            yield ("oldest", oldest), ("below", below), ("other_than", other_than)
        yield from ((("driver", text),) for text, _, fits in texts if fits and text not in inside)

    def _list_node_fields(self, box: Box, widths: Sequence[int]) -> Iterator[tuple[str, Any]]:
        """Yield the fields of a Need about other facts of a node; facts with all values have none."""
        for (fact, value_classes), values, width in zip(self._node.items(), box, widths, strict=True):
            if len(values) < width:
                shown = tuple(value for index in sorted(values) for value in value_classes[index].shown)
                field = {ACCELERATORS: "accelerators", KIND: "modules", DIFFERS: "differs"}[fact]
                yield field, shown if fact == KIND else shown[0]

    def _make_unsupported_error(self, fact: str) -> UnsupportedConditionError:
        names = ", ".join(applied.rule.name for applied in self._rules if fact in applied.compared)
        carrier = self._scope.vocabulary.carrier
        return UnsupportedConditionError(f"{carrier} cannot express how these rules compare {fact}: {names}")
