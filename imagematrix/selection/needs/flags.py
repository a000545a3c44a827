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
    told = vocabulary.flags(scope.arch)
    elsewhere = frozenset().union(*map(vocabulary.flags, ARCHITECTURES)) - told
    compared = frozenset(map(str, rule.compared[FLAGS])) - elsewhere
    found = _find_minimal_conditions(get_judge(rule, scope).with_flags, compared)
    if found is None:
        raise UnsupportedConditionError(
            f"the rule {name} combines too many CPU flags for {vocabulary.carrier}"
        )
    untold = frozenset().union(*(some.present | some.absent for some in found)) - told
    if untold:
        lack = f"that {vocabulary.carrier} do not have: {', '.join(sorted(untold))}"
        raise UnsupportedConditionError(f"the rule {name} compares cpu.flags {lack}")
    return found


def combine_conditions(every: Iterable[Iterable[FlagCondition]]) -> tuple[FlagCondition, ...]:
    """Return the alternatives that meet one of each group."""
    found: dict[FlagCondition, None] = {}
    for some in product(*every):
        flags = FlagCondition(
            present=frozenset().union(*(each.present for each in some)),
            absent=frozenset().union(*(each.absent for each in some)),
        )
        if not flags.present & flags.absent:
            found[flags] = None
    return tuple(found)


def _find_minimal_conditions(
    holds: Callable[[frozenset[str]], bool], compared: frozenset[str]
) -> tuple[FlagCondition, ...] | None:
    """Return the alternatives, or None if there are too many flags for them."""
    loose, fits = compared, compared
    if len(compared) > TABLE:
        some = (compared, *(compared - {flag} for flag in sorted(compared)), frozenset[str]())
        # No flag has this name: the empty set may be one that fits.
        fits = next(filter(holds, some), frozenset({""}))
        if fits == {""}:
            return None
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
