"""Exclude rules that leave exactly the needed cells of the product of the axes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    Point = Mapping[str, str]
    Axes = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedRule:
    """One rule: the values of some axes that together are not needed, and why."""

    matches: Mapping[str, tuple[str, ...]]
    why: str

    def drops(self, point: Point) -> bool:
        """Whether it drops a cell."""
        return all(point.get(axis) in values for axis, values in self.matches.items())


def propose_rules(axes: Axes, unneeded: Sequence[Point], needed: Collection[Point]) -> list[ProposedRule]:
    """Return the rules that drop the `unneeded` cells and none of the `needed` ones, in order.

    Each drops a cell that those before it do not, because a rule that drops nothing is an error.
    """
    rules: list[ProposedRule] = []
    remaining = list(unneeded)
    for rule in itertools.chain(
        _generate_pair_rules(axes, needed), _generate_exact_rules(axes, unneeded, needed)
    ):
        after = [point for point in remaining if not rule.drops(point)]
        if len(after) < len(remaining):
            rules.append(rule)
            remaining = after
    return rules


def _generate_pair_rules(axes: Axes, needed: Collection[Point]) -> Iterator[ProposedRule]:
    """Yield rules about two axes: values that no needed cell has together."""
    for first, second in itertools.combinations(axes, 2):
        seconds_by_first: dict[str, set[str]] = {value: set() for value in axes[first]}
        for point in needed:
            if first in point and second in point:
                seconds_by_first[point[first]].add(point[second])
        groups: dict[tuple[str, ...], list[str]] = {}
        for value, partners in seconds_by_first.items():
            absent = tuple(second_value for second_value in axes[second] if second_value not in partners)
            if absent:
                groups.setdefault(absent, []).append(value)
        for absent, values in groups.items():
            yield ProposedRule(matches={first: tuple(values), second: absent}, why="no node needs both")


def _generate_exact_rules(
    axes: Axes, unneeded: Sequence[Point], needed: Collection[Point]
) -> Iterator[ProposedRule]:
    """Yield a rule for each combination of all other axes with values of the last axis that it lacks."""
    *leading_axes, last = axes
    needed_points = {tuple(point.get(axis) for axis in axes) for point in needed}
    groups: dict[tuple[str | None, ...], list[str]] = {}
    for point in unneeded:
        if last in point and tuple(point.get(axis) for axis in axes) not in needed_points:
            groups.setdefault(tuple(point.get(axis) for axis in leading_axes), []).append(point[last])
    for values, dropped in groups.items():
        matches = {
            axis: (value,) for axis, value in zip(leading_axes, values, strict=True) if value is not None
        }
        yield ProposedRule(
            matches={**matches, last: tuple(dropped)}, why="no node needs all of these together"
        )
