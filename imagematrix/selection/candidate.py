"""The Candidate: one variant with the result of every rule."""

from __future__ import annotations

from operator import attrgetter

from imagematrix.record import Record, replace
from imagematrix.selection.hardware import sample
from imagematrix.selection.order import key
from imagematrix.selection.rules import RULES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence
    from typing import Any

    from imagematrix.catalog.catalog import Variant
    from imagematrix.selection.order import Criterion
    from imagematrix.selection.rule import Gap, RuleResult
    from imagematrix.selection.target import Target

__all__ = ["Candidate", "candidates", "results"]

# The fields that distinguish variants; no rule reads their own axes.
PARTS = frozenset({"axes"}).union(*(rule.parts for rule in RULES))


class Candidate(Record):
    """One variant as the rules see it; `rank` is its place among those that fit, from 1, or None."""

    variant: Variant
    rank: int | None
    rules: tuple[RuleResult, ...]

    @property
    def reference(self) -> str:
        """The variant's image reference."""
        return self.variant.reference

    @property
    def fits(self) -> bool:
        """Whether every rule holds."""
        return self.rank is not None

    @property
    def failing(self) -> tuple[RuleResult, ...]:
        """The rules that do not hold."""
        return tuple(rule for rule in self.rules if not rule.ok)

    def to_json(self) -> dict[str, object]:
        """Return one element of the Selection document's `candidates`."""
        return {
            "reference": self.reference,
            "rank": self.rank,
            "fits": self.fits,
            "rules": [rule.to_json() for rule in self.rules],
        }


def candidates(
    variants: Iterable[Variant], criteria: Sequence[Criterion], target: Target
) -> tuple[Candidate, ...]:
    """Return every variant with every rule's result: those that fit by rank, then the others, nearest first.

    If another variant differs only in what a failing rule reads, the remedy of that rule names it.
    """
    one_of_each = sample(target)

    def place(candidate: Candidate) -> tuple[Any, ...]:
        failing, variant = candidate.failing, candidate.variant
        return (
            bool(failing),
            any(result.rule == "platform" for result in failing),
            bool(failing and bool(target.gpus) is not variant.gpu),
            len(failing),
            _distances(one_of_each, variant),
            *key(criteria, one_of_each, variant),
        )

    placed = sorted(
        (Candidate(variant=variant, rank=None, rules=results(target, variant)) for variant in variants),
        key=place,
    )
    built = {
        _without(result.rule, candidate.variant): candidate.reference
        for candidate in reversed(placed)
        for result in candidate.rules
        if result.ok
    }
    return tuple(
        replace(candidate, rules=tuple(_with_remedy(candidate, result, built) for result in candidate.rules))
        if candidate.failing
        else replace(candidate, rank=rank)
        for rank, candidate in enumerate(placed, 1)
    )


def results(target: Target, variant: Variant) -> tuple[RuleResult, ...]:
    """Return the results of all rules that apply to `variant`, or may apply because a fact is unknown."""
    return tuple(rule.result(target, variant) for rule in RULES if rule.may_apply(variant))


def _distances(target: Target, variant: Variant) -> tuple[Gap, ...]:
    """Return how far off a variant is, by every rule.

    The last rules come first: they are about hardware. The others are about drivers, which are easier to
    change, on a node or in the last layer of an image.
    """
    return tuple(rule.distance(target, variant) for rule in reversed(RULES))


def _with_remedy(candidate: Candidate, result: RuleResult, built: Mapping[Hashable, str]) -> RuleResult:
    reference = None if result.ok else built.get(_without(result.rule, candidate.variant))
    return replace(result, fix=f"use {reference}, which differs only in this") if reference else result


def _without(name: str, variant: Variant) -> Hashable:
    """Return the fields of a variant except those that a build would change to make the rule `name` hold."""
    return name, _OTHERS[name](variant)


_OTHERS = {rule.name: attrgetter(*sorted(PARTS.difference(rule.parts))) for rule in RULES}
