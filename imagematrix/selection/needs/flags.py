"""The CPU flags that a rule needs or refuses, from its verdicts on sets of flags."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from imagematrix.selection.needs.grid import find_hyperrectangles
from imagematrix.selection.needs.verdicts import ARCH, FLAGS, UnsupportedConditionError, get_judge
from imagematrix.selection.selection_target import ARCHITECTURES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from imagematrix.selection.needs.verdicts import AppliedRule, Scope

TABLE = 8  # most flags to evaluate in all combinations


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagCondition:
    """The flags that a node has, and those that it lacks."""

    present: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()


@lru_cache(maxsize=1024)
def find_flag_conditions(rule: AppliedRule, scope: Scope) -> tuple[FlagCondition, ...]:
    """Return the alternatives of which a node has to meet one; flags of other architectures are absent.

    Up to `TABLE` flags are evaluated in all combinations. Of more flags, those that each decide by themselves
    are fixed first, starting from a set of flags that fits: all, all but one, or none. If the others decided
    only in combination with these, some nodes that fit would match no alternative.
    """
    name, vocabulary = rule.rule.name, scope.vocabulary
    if rule.compared.keys() - {ARCH, FLAGS}:
        raise UnsupportedConditionError(f"the rule {name} combines CPU flags with other facts")
    vocabulary_flags = vocabulary.flags(scope.arch)
    foreign = frozenset().union(*map(vocabulary.flags, ARCHITECTURES)) - vocabulary_flags
    compared = frozenset(map(str, rule.compared[FLAGS])) - foreign
    conditions = _find_minimal_conditions(get_judge(rule, scope).judge_flags, compared)
    if conditions is None:
        raise UnsupportedConditionError(
            f"the rule {name} combines too many CPU flags for {vocabulary.carrier}"
        )
    flags = frozenset().union(*(condition.present | condition.absent for condition in conditions))
    missing = flags - vocabulary_flags
    if missing:
        lack = f"that {vocabulary.carrier} do not have: {', '.join(sorted(missing))}"
        raise UnsupportedConditionError(f"the rule {name} compares cpu.flags {lack}")
    return conditions


def combine_conditions(groups: Iterable[Iterable[FlagCondition]]) -> tuple[FlagCondition, ...]:
    """Return the alternatives that meet one condition of each group."""
    combined: dict[FlagCondition, None] = {}
    for conditions in product(*groups):
        flags = FlagCondition(
            present=frozenset().union(*(condition.present for condition in conditions)),
            absent=frozenset().union(*(condition.absent for condition in conditions)),
        )
        if not flags.present & flags.absent:
            combined[flags] = None
    return tuple(combined)


def _find_minimal_conditions(
    holds: Callable[[frozenset[str]], bool], compared: frozenset[str]
) -> tuple[FlagCondition, ...] | None:
    """Return the alternatives, or None if too many flags decide in combination."""
    loose, fits = compared, compared
    if len(compared) > TABLE:
        samples = (compared, *(compared - {flag} for flag in sorted(compared)), frozenset[str]())
        fitting = next(filter(holds, samples), None)
        if fitting is None:
            return ()
        fits = fitting
        # What fits with and without a flag may depend on it together with others.
        loose = frozenset(flag for flag in compared if holds(fits ^ {flag}))
    if len(loose) > TABLE:
        return None
    names = sorted(loose)
    fixed = FlagCondition(present=fits - loose, absent=compared - fits - loose)
    table = {
        row
        for row in product((0, 1), repeat=len(names))
        if holds(fixed.present | {name for name, has in zip(names, row, strict=True) if has})
    }
    return tuple(
        FlagCondition(
            present=fixed.present | {name for name, has in zip(names, box, strict=True) if has == {1}},
            absent=fixed.absent | {name for name, has in zip(names, box, strict=True) if has == {0}},
        )
        for box in find_hyperrectangles(table, [2] * len(names))
    )
