"""The Candidate: one variant with the result of every rule."""

from __future__ import annotations

from operator import attrgetter

from imagematrix.common.record import Record, replace
from imagematrix.selection.hardware_key import keep_distinct_gpus
from imagematrix.selection.order import make_sort_key
from imagematrix.selection.rule import PLATFORM, Remedy, suggest_axis_values
from imagematrix.selection.rules import RULES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.order import Criterion
    from imagematrix.selection.remedy import Remedies
    from imagematrix.selection.rule import RuleResult, RuleWarning
    from imagematrix.selection.selection_target import Target

# The fields that distinguish variants; no rule reads their own axes.
PARTS = frozenset({"axes"}).union(*(rule.parts for rule in RULES))


class Candidate(Record):
    """One variant as the rules see it; `rank` is its place among those that fit, from 1, or None.

    `warnings` say what is not proven of one that fits.
    """

    variant: Variant
    rank: int | None
    rules: tuple[RuleResult, ...]
    warnings: tuple[RuleWarning, ...] = ()

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
            **({"warnings": [warning.to_json() for warning in self.warnings]} if self.warnings else {}),
        }


def rank_candidates(
    variants: Iterable[Variant], criteria: Sequence[Criterion], target: Target
) -> tuple[Candidate, ...]:
    """Return every variant with every rule's result: those that fit by rank, then the others, nearest first.

    If another variant differs only in what a failing rule reads, the remedy of that rule names it.
    """
    sampled = keep_distinct_gpus(target)

    def rank_key(candidate: Candidate) -> tuple[Any, ...]:
        failing, variant = candidate.failing, candidate.variant
        # `VariantIndex.find_nearest` finds the first of those that fail in the same order, without reasons.
        return (
            bool(failing),
            any(result.rule == PLATFORM for result in failing),
            bool(failing and bool(target.gpus) is not variant.gpu),
            len(failing),
            # The last rules come first: they are about hardware. The others are about drivers, which are
            # easier to change, on a node or in the last layer of an image.
            tuple(rule.measure_refusal(sampled, variant) for rule in reversed(RULES)),
            *make_sort_key(criteria, sampled, variant),
        )

    ranked = sorted(
        (
            Candidate(variant=variant, rank=None, rules=evaluate_without_remedies(target, variant))
            for variant in variants
        ),
        key=rank_key,
    )
    fitting = [
        replace(candidate, rank=rank, warnings=collect_warnings(sampled, candidate.variant))
        for rank, candidate in enumerate(ranked, 1)
        if not candidate.failing
    ]
    refused = ranked[len(fitting) :]
    return (*fitting, *_add_remedies(refused, ranked, target)) if refused else tuple(fitting)


def evaluate_rules(
    target: Target, variant: Variant, remedies: Remedies | None = None
) -> tuple[RuleResult, ...]:
    """Return the results of all rules that apply to `variant`, or may apply because a fact is unknown."""
    results = evaluate_without_remedies(target, variant)
    if all(result.ok for result in results):
        return results
    from imagematrix.selection.remedy import Remedies

    return (remedies or Remedies(target)).add_remedies(variant, results)


def evaluate_without_remedies(target: Target, variant: Variant) -> tuple[RuleResult, ...]:
    """Return what `evaluate_rules` does, without the remedies, which take long to find."""
    return tuple(rule.evaluate(target, variant) for rule in RULES if rule.may_apply(variant))


def collect_warnings(target: Target, variant: Variant) -> tuple[RuleWarning, ...]:
    """Return the warnings of all rules about a variant that fits."""
    return tuple([warning for rule in RULES for warning in rule.collect_warnings(target, variant)])


def find_failing_results(target: Target, variant: Variant) -> tuple[RuleResult, ...]:
    """Return the results of the rules that do not hold, as `evaluate_without_remedies` does."""
    failing = (
        rule for rule in RULES if rule.need(variant) is not None and not rule.is_satisfied(target, variant)
    )
    return tuple([rule.evaluate(target, variant) for rule in failing])


def _add_remedies(
    refused: Iterable[Candidate], ranked: Sequence[Candidate], target: Target
) -> Iterator[Candidate]:
    """Yield the candidates that are refused, with the nearest change that would end each refusal."""
    from imagematrix.selection.remedy import Remedies

    remedies = Remedies(target)
    failing = {
        candidate.reference: frozenset([result.rule for result in candidate.failing]) for candidate in ranked
    }
    # The variants that satisfy a rule, by the fields that a build for that rule would keep.
    satisfying = {
        (result.rule, _KEPT_FIELDS[result.rule](candidate.variant)): candidate.variant
        for candidate in reversed(ranked)  # the last one stays, which is the best
        for result in candidate.rules
        if result.ok
    }

    def name_existing_variant(candidate: Candidate, result: RuleResult) -> RuleResult:
        """Replace the advice to build a variant by the one that exists already, if it helps."""
        if result.ok:
            return result
        existing = satisfying.get((result.rule, _KEPT_FIELDS[result.rule](candidate.variant)))
        if existing is None or not failing[existing.reference] < failing[candidate.reference]:
            return result
        differing = dict({*existing.axes} - {*candidate.variant.axes})
        if differing:
            return replace(result, remedy=suggest_axis_values("pass {}", dict(sorted(differing.items()))))
        return replace(result, remedy=Remedy(words=f"use {existing.reference}, which differs only in this"))

    for candidate in refused:
        rules = remedies.add_remedies(candidate.variant, candidate.rules)
        yield replace(candidate, rules=tuple(name_existing_variant(candidate, result) for result in rules))


# By rule, the fields of a variant except those that a build would change to make the rule hold.
_KEPT_FIELDS = {rule.name: attrgetter(*sorted(PARTS.difference(rule.parts))) for rule in RULES}
