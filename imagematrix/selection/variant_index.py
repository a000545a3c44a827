"""The variants of a catalog, grouped so that a rule decides once for all variants with equal needs."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from operator import attrgetter, itemgetter

from imagematrix.hardware.vendors.versions import make_natural_key
from imagematrix.selection.hardware_key import make_order_key
from imagematrix.selection.order import make_sort_key, rank_default_values
from imagematrix.selection.rules import RULES, device_code
from imagematrix.selection.verdicts import RuleGroups

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
    from typing import Any

    from imagematrix.images.catalog.catalog import DefaultOrder, Variant
    from imagematrix.selection.order import Criterion
    from imagematrix.selection.selection_target import Target
    from imagematrix.selection.verdicts import Group, VariantSet, Verdicts

KEPT = 4096  # sets of variants of which the top-ranked ones are kept

# A catalog may have thousands of variants, and a fleet thousands of kinds of hardware, so nothing here is
# computed variant by variant. Two ideas make that possible:
#
# - A rule reads only its `need` of a variant. Variants with equal needs form a group, and the rule decides
#   once for an example of it: a catalog for 8 drivers has 8 groups for `driver-exact`, however long it is.
# - A set of variants, a VariantSet, is a mask: an integer with bit i for variant i. What all rules let pass
#   is then one AND for each rule, whatever the size of the catalog.


class VariantIndex:
    """The variants of a catalog, grouped by what each rule and each criterion of the order read.

    Sets of variants are masks. The variants are numbered in the order of their references.
    """

    __slots__ = (
        "_axes",
        "_criteria",
        "_for_gpus",
        "_references",
        "_rule_groups",
        "_top_ranked",
        "_variants",
        "criteria",
        "default_groups",
        "everything",
    )

    def __init__(
        self, variants: tuple[Variant, ...], criteria: Sequence[Criterion], default_order: DefaultOrder = ()
    ) -> None:
        self._variants = sorted(variants, key=attrgetter("reference"))
        self._references: dict[VariantSet, frozenset[str]] = {}
        self._top_ranked: dict[tuple[Hashable, VariantSet], VariantSet] = {}
        self.everything = (1 << len(variants)) - 1
        self.criteria = criteria
        needs = [*(rule.need for rule in RULES), *(criterion.need for criterion in criteria)]
        singles = [1 << index for index in range(len(variants))]
        # Some criteria have the need of a rule, or of another criterion.
        groups = {need: _group_by_need(need, self._variants, singles) for need in dict.fromkeys(needs)}
        # A need of None says that the rule does not apply.
        applying = [
            (rule, [group for need, group in groups[rule.need].items() if need is not None]) for rule in RULES
        ]
        self._rule_groups = RuleGroups([(rule, members) for rule, members in applying if members])
        self._criteria = {criterion: list(groups[criterion.need].values()) for criterion in criteria}
        self._axes = list(_group_by_need(attrgetter("axes"), self._variants, singles).values())
        # The sets of variants with equal places in the order of defaults, the first values first.
        self.default_groups = [self.everything]
        if default_order:
            by_rank = _group_by_need(partial(rank_default_values, default_order), self._variants, singles)
            self.default_groups = [members for _, (_, members) in sorted(by_rank.items(), key=itemgetter(0))]
        self._for_gpus = sum(members for example, members in groups[device_code.need].values() if example.gpu)

    @property
    def flags(self) -> frozenset[str]:
        """The CPU flags that some variant needs: no rule reads any other."""
        return self._rule_groups.flags

    @property
    def facts(self) -> frozenset[str]:
        """The facts of a host that the rules read which apply to some variant."""
        return self._rule_groups.facts

    def find_fitting(self, target: Target) -> VariantSet:
        """Return the variants for which every rule holds."""
        remaining = self.everything
        for verdicts in self._rule_groups.get_verdicts(target):
            failing = verdicts.find_failing(target, remaining)
            remaining = remaining & ~failing if failing else remaining
        return remaining

    def find_nearest(self, target: Target) -> Variant:
        """Return the variant that comes nearest to fitting; the catalog must not be empty.

        If possible, it is for the target's architecture, and for GPUs if some are passed, else for CPUs. Of
        these, it fails the fewest rules by the smallest distance.
        """
        by_rule = self._rule_groups.get_verdicts(target)
        # The first rule is the one about the architecture.
        pool = (self.everything & ~by_rule[0].find_failing(target, self.everything)) or self.everything
        wanted = self._for_gpus if target.gpus else ~self._for_gpus
        pool = (pool & wanted) or pool
        mask = next(filter(None, _split_by_failure_count(by_rule, target, pool)))
        for verdicts in reversed(by_rule):
            gaps = verdicts.measure_gaps(target, mask)
            least = min(gap for gap, _ in gaps)
            mask = sum(members for gap, members in gaps if gap == least)
        return self.get_best(target, mask)

    def group_by_failure_count(self, target: Target, pool: VariantSet) -> list[VariantSet]:
        """Return the variants of a set that fail no rule, then those that fail one rule, two, and so on."""
        return _split_by_failure_count(self._rule_groups.get_verdicts(target), target, pool)

    def collect_references(self, mask: VariantSet) -> frozenset[str]:
        """Return the references of a set of variants; the same object for the same set."""
        references = self._references.get(mask)
        if references is None:
            references = frozenset([variant.reference for variant in self.list_members(mask)])
            self._references[mask] = references
        return references

    def rank_variants(self, target: Target, mask: VariantSet) -> list[Variant]:
        """Return the variants of a set, best first."""
        return sorted(
            self.list_members(mask), key=lambda variant: make_sort_key(self.criteria, target, variant)
        )

    def find_differing_axes(self, mask: VariantSet) -> dict[str, tuple[str, ...]]:
        """Return the image's own axes in which variants of a set differ, each with its values there."""
        return find_differing_axes(example for example, members in self._axes if members & mask)

    def keep_first_defaults(self, mask: VariantSet) -> VariantSet:
        """Return the variants of a set whose values come first in the order of defaults."""
        return next((mask & group for group in self.default_groups if mask & group), mask)

    def get_best(self, target: Target, mask: VariantSet) -> Variant:
        """Return the variant of a set that has the least key of the order."""
        return self.find_top_ranked(target, mask)[0]

    def find_top_ranked(self, target: Target, mask: VariantSet) -> list[Variant]:
        """Return the variants of a set that the criteria of the order rank first, sorted by reference."""
        key = make_order_key(target), mask
        top_ranked = self._top_ranked.get(key)
        if top_ranked is None:
            # Each criterion narrows the set to the variants with the least score.
            for criterion in self.criteria:
                scores = self.compute_scores(criterion, target, mask)
                least = min(score for score, _ in scores)
                mask &= sum(members for score, members in scores if score == least)
            if len(self._top_ranked) >= KEPT:
                self._top_ranked.clear()
            top_ranked = self._top_ranked[key] = mask
        return self.list_members(top_ranked)

    def compute_scores(
        self, criterion: Criterion, target: Target, mask: VariantSet
    ) -> list[tuple[Any, VariantSet]]:
        """Return the scores of a set's variants by a criterion, the less the better.

        Each comes with a group of variants that have it. Groups may have equal scores, and members outside
        the set.
        """
        groups = self._criteria[criterion]
        return [(criterion.rate(target, example), members) for example, members in groups if members & mask]

    def group_by_need(self, need: Callable[[Variant], Hashable]) -> list[VariantSet]:
        """Return the sets of variants with equal needs."""
        singles = [1 << index for index in range(len(self._variants))]
        return [members for _, members in _group_by_need(need, self._variants, singles).values()]

    def list_members(self, mask: VariantSet) -> list[Variant]:
        """Return the variants of a set, sorted by reference."""
        return [self._variants[bit.bit_length() - 1] for bit in split_mask(mask)]


def get_first(mask: VariantSet) -> VariantSet:
    """Return the set of only the first member of a set."""
    return mask & -mask


def split_mask(mask: VariantSet) -> Iterator[VariantSet]:
    """Yield the members of a set as sets of one member, lowest first."""
    while mask:
        lowest = mask & -mask  # as `get_first`, without a call for each member
        yield lowest
        mask ^= lowest


def _group_by_need(
    need: Callable[[Variant], Hashable], variants: list[Variant], singles: list[VariantSet]
) -> dict[Hashable, Group]:
    """Return a group for each distinct need; `singles` has the mask of each variant alone.

    The masks are made once for all needs: shifting integers of a thousand bits takes longer than grouping.
    """
    groups: defaultdict[Hashable, list[VariantSet]] = defaultdict(list)
    for value, member in zip(map(need, variants), singles, strict=True):
        groups[value].append(member)
    return {value: (variants[members[0].bit_length() - 1], sum(members)) for value, members in groups.items()}


def _split_by_failure_count(
    by_rule: Iterable[Verdicts], target: Target, pool: VariantSet
) -> list[VariantSet]:
    """Return the variants of a set that fail no rule, then those that fail one rule, two, and so on."""
    by_failures = [pool]
    for verdicts in by_rule:
        failing = verdicts.find_failing(target, pool)
        # With this rule, n failures are n without it, or n - 1 and this one.
        shifted = zip([*by_failures, 0], [0, *by_failures], strict=True)
        by_failures = [(as_many & ~failing) | (one_less & failing) for as_many, one_less in shifted]
    return by_failures


def find_differing_axes(variants: Iterable[Variant]) -> dict[str, tuple[str, ...]]:
    """Return the image's own axes in which `variants` differ, each with its values there.

    A variant without such an axis has the value "" on it.
    """
    combinations = [dict(axes) for axes in {variant.axes for variant in variants}]
    axis_names = {axis for axes in combinations for axis in axes}
    values = {axis: {axes.get(axis, "") for axes in combinations} for axis in axis_names}
    return {
        axis: tuple(sorted(values[axis], key=make_natural_key))
        for axis in sorted(values)
        if len(values[axis]) > 1
    }
