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
    JudgedGrid,
    UnsupportedConditionError,
    get_judge,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence
    from typing import Any

    from imagematrix.selection.needs.grid import Box, Part
    from imagematrix.selection.needs.verdicts import AppliedRule, Scope

    Condition = tuple[tuple[str, Any], ...]  # fields of a Need
    Row = tuple[int, ...]  # of a node in a table: the value classes of NODE_FACTS

ACCELERATORS, KIND, DIFFERS = NODE_FACTS = ("accelerators", "driver.kind", "driver.user_mode_differs")
VERSION, LAST_BRANCH = "driver.version", "gpus.last_branch"
LISTED = {"ok", "vgpu"}  # the states of GPUs that NVIDIA's software lists
ANY = ValueClass((), ())  # stands for all values of a fact that no rule compares


@lru_cache(maxsize=1024)
def find_alternatives(rules: tuple[AppliedRule, ...], scope: Scope, *, listed: bool) -> tuple[Need, ...]:
    """Return the ways, in general or for `listed` GPUs; raise InexpressibleError if there are none."""
    table = _make_table(rules, scope)
    return tuple(table.needs(table.listed() if listed else table.fitting))


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
        return (ANY,) if compared is None else self._scope.vocabulary.scales[fact].value_classes(compared)

    @cached_property
    def fitting(self) -> dict[Row, list[int]]:
        """For each kind of node, the combinations that fit with each of the drivers."""
        judged = [JudgedGrid(get_judge(rule, self._scope), self._grid) for rule in self._rules]
        table: dict[Row, list[int]] = {}
        for row in product(*(range(len(value_classes)) for value_classes in self._node.values())):
            node = {
                fact: value_classes[value]
                for (fact, value_classes), value in zip(self._node.items(), row, strict=True)
            }
            # Without a driver, there are no facts of one.
            bare = {ACCELERATORS: node[ACCELERATORS]}
            nodes = (node | {VERSION: driver} if driver else bare for driver in self._drivers)
            table[row] = [self._all(judged, each) for each in nodes]
        return table

    def _all(self, judged: Sequence[JudgedGrid], node: Mapping[str, ValueClass]) -> int:
        fits = self._everything
        for one in judged:
            fits &= one.fitting(node)
            if not fits:
                break
        return fits

    def listed(self) -> dict[Row, list[int]]:
        """Return the same for GPUs that are listed, whatever the kind of modules and the user-mode driver."""
        same = len(self._node[DIFFERS]) - 1  # the last of True and False
        table: dict[Row, list[int]] = {}
        for (sign, kind, differs), sets in self.fitting.items():
            if differs == same:
                # GPUs are listed only with modules that drive them: what other modules refuse does not count.
                undriven = self._undriven(self._node[KIND][kind])
                known = table.setdefault((sign, 0, 0), [self._everything] * len(sets))
                table[sign, 0, 0] = [some & (fits | undriven) for some, fits in zip(known, sets, strict=True)]
        return {
            row: [self._listed(fits, driver) for fits, driver in zip(sets, self._drivers, strict=True)]
            for row, sets in table.items()
        }

    def _undriven(self, kind: ValueClass) -> int:
        """Return the combinations with GPUs that a kind of modules does not drive."""
        modules = kind.samples[0] if kind.samples else None
        return self._grid.where(
            "gpus.compute", lambda value_class: not gpus.is_supported(modules, value_class.samples[0])
        )

    @cached_property
    def _unlisted(self) -> int:
        """The combinations with a state in which NVIDIA's software does not list a GPU."""
        return self._grid.where("gpus.state", lambda value_class: LISTED.isdisjoint(value_class.shown))

    @cached_property
    def _supported(self) -> int:
        """The combinations with GPUs that the newest driver supports."""
        return self._grid.where(LAST_BRANCH, self._grid.value_classes[LAST_BRANCH][-1].__eq__)

    def _listed(self, fits: int, driver: ValueClass | None) -> int:
        """Return combinations without GPUs that NVIDIA's software does not list with a driver.

        A branch that is the last for no GPU listed is treated as the next one that is.
        """
        if len(self._drivers) > 1 and driver is None:
            return fits & self._none
        fits &= ~self._unlisted
        if LAST_BRANCH not in self._grid.value_classes:
            return fits
        branch = versions.get_branch(driver.samples[0]) if driver and driver.samples else 0
        limits = self._grid.value_classes[LAST_BRANCH][:-1]
        above = self._supported
        result, next_listed = fits & (above | self._none), fits & above
        for limit in reversed(limits):
            # From the combinations with the next limit to those with this one.
            next_listed >>= self._grid.strides[LAST_BRANCH]
            if _is_last_branch(limit, branch):
                next_listed &= fits
            result |= next_listed
        return result

    def needs(self, table: dict[Row, list[int]]) -> Iterator[Need]:
        """Yield the conditions that a table consists of."""
        widths = [max(values) + 1 for values in zip(*table, strict=True)]
        parts = self._grid.parts(fits & self._grid.everything for sets in table.values() for fits in sets)
        # By what they ask of GPUs, so that nodes which ask the same share a condition.
        pieces: dict[Hashable, tuple[bool | None, Part, dict[Row, list[bool]]]] = {}
        for row, sets in table.items():
            for driver, fits in enumerate(sets):
                for has_gpus, part in self._pieces(fits, parts):
                    _, _, rows = pieces.setdefault((has_gpus, *part.items()), (has_gpus, part, {}))
                    rows.setdefault(row, [False] * len(sets))[driver] = True
        for has_gpus, part, rows in pieces.values():
            about_gpus = dict(self._about_gpus(part))
            conditions: dict[Condition, set[Row]] = {}
            for row, fitting in rows.items():
                for condition in self._about_driver(fitting):
                    conditions.setdefault(condition, set()).add(row)
            for condition, found in conditions.items():
                for box in find_hyperrectangles(found, widths):
                    about_node = dict(self._about_node(box, widths))
                    yield Need(
                        arch=self._scope.arch, gpus=has_gpus, **about_gpus, **dict(condition), **about_node
                    )

    def _pieces(self, fits: int, parts: dict[int, tuple[Part, ...]]) -> Iterator[tuple[bool | None, Part]]:
        """Yield the conditions on GPUs, each with whether there have to be any."""
        if fits == self._everything:
            yield None, {}
            return
        if fits & self._none:
            yield False, {}
        yield from ((True, part) for part in parts[fits & self._grid.everything])

    def _about_gpus(self, part: Part) -> Iterator[tuple[str, Any]]:
        """Yield the fields of a Need about GPUs."""
        for fact, value_classes in part.items():
            if fact == "gpus.compute":
                yield (
                    "computes",
                    tuple(
                        sorted(code for value_class in value_classes for code in _get_numbers(value_class))
                    ),
                )
            elif fact == LAST_BRANCH:
                # The least of all GPUs decides: a condition includes all greater ones.
                if value_classes != self._grid.value_classes[fact][-len(value_classes) :]:
                    raise self._inexpressible(fact)
                yield "limit", value_classes[0].shown[0]
            elif fact == "gpus.data_centre":
                if value_classes[0].shown != (True,):
                    raise self._inexpressible(fact)
                yield "data_centre", True
            else:
                yield (
                    f"{fact.removeprefix(GPUS)}s",
                    tuple(sorted(name for value_class in value_classes for name in value_class.shown)),
                )

    def _about_driver(self, fitting: Sequence[bool]) -> Iterator[Condition]:
        """Yield the fields of a Need about the driver, from whether each of the drivers fits."""
        without, *loaded = fitting
        versions_count = VERSION in self._compared
        if len(self._drivers) == 1 or (not versions_count and without and loaded[0]):
            yield ()
            return
        if without:
            yield (("loaded", False),)
        if versions_count:
            yield from self._about_version(loaded)
        elif loaded[0]:
            yield (("loaded", True),)

    def _about_version(self, fitting: Sequence[bool]) -> Iterator[Condition]:
        """Yield runs of intervals without the texts in them that do not fit, and further texts that do."""
        every = [
            (*value_class.shown, fits)
            for value_class, fits in zip(self._drivers[1:], fitting, strict=True)
            if value_class
        ]
        spans = [(start, end, fits) for start, end, fits in every if not isinstance(start, str)]
        texts = every[len(spans) :]
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

    def _about_node(self, box: Box, widths: Sequence[int]) -> Iterator[tuple[str, Any]]:
        """Yield the fields of a Need about other facts of a node; facts with all values have none."""
        for (fact, value_classes), values, width in zip(self._node.items(), box, widths, strict=True):
            if len(values) < width:
                shown = tuple(value for index in sorted(values) for value in value_classes[index].shown)
                field = {ACCELERATORS: "accelerators", KIND: "modules", DIFFERS: "differs"}[fact]
                yield field, shown if fact == KIND else shown[0]

    def _inexpressible(self, fact: str) -> UnsupportedConditionError:
        names = ", ".join(each.rule.name for each in self._rules if fact in each.compared)
        carrier = self._scope.vocabulary.carrier
        return UnsupportedConditionError(f"{carrier} cannot express how these rules compare {fact}: {names}")


def _get_numbers(value_class: ValueClass) -> range:
    """Return the numbers of a value class."""
    first, last = value_class.shown
    return range(first, last + 1)


def _is_last_branch(value_class: ValueClass, branch: int) -> bool:
    """Whether one of these branches is the last for some GPU, and not older than a branch."""
    first, last = value_class.shown
    return any(max(first, branch) <= limit <= last for limit in gpus.list_last_branches())
