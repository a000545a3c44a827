"""The variants of a catalog, grouped so that a rule decides once for all variants with equal needs."""

from __future__ import annotations

from operator import attrgetter

from imagematrix.hardware.vendors.versions import make_natural_key
from imagematrix.selection.hardware_key import make_order_key
from imagematrix.selection.order import make_sort_key
from imagematrix.selection.rules import RULES
from imagematrix.selection.verdicts import RuleGroups

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
    from typing import Any

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.order import Criterion
    from imagematrix.selection.selection_target import Target
    from imagematrix.selection.verdicts import Group, Verdicts

KEPT = 4096  # sets of variants of which the leading ones are kept


class VariantIndex:
    """The variants of a catalog, grouped by what each rule and each criterion of the order read.

    A set of variants is a mask: an integer with bit i for variant i, so that thousands are combined at once.
    The variants are numbered in the order of their references.
    """

    __slots__ = (
        "_axes",
        "_criteria",
        "_for_gpus",
        "_leading",
        "_references",
        "_rule_groups",
        "_variants",
        "criteria",
        "everything",
    )

    def __init__(self, variants: tuple[Variant, ...], criteria: Sequence[Criterion]) -> None:
        self._variants = sorted(variants, key=lambda variant: variant.reference)
        self._references: dict[int, frozenset[str]] = {}
        self._leading: dict[tuple[Hashable, int], int] = {}
        self.everything = (1 << len(variants)) - 1
        self.criteria = criteria
        needs = [*(rule.need for rule in RULES), *(criterion.need for criterion in criteria)]
        singles = [1 << index for index in range(len(variants))]
        # Some criteria have the need of a rule.
        groups = {need: _group_by_need(need, self._variants, singles) for need in dict.fromkeys(needs)}
        applying = [
            (rule, [group for needed, group in groups[rule.need].items() if needed is not None])
            for rule in RULES
        ]
        self._rule_groups = RuleGroups([(rule, some) for rule, some in applying if some])
        self._criteria = {criterion: list(groups[criterion.need].values()) for criterion in criteria}
        self._axes = list(_group_by_need(attrgetter("axes"), self._variants, singles).values())
        self._for_gpus = sum(1 << index for index, variant in enumerate(self._variants) if variant.gpu)

    @property
    def flags(self) -> frozenset[str]:
        """The CPU flags that some variant needs: no rule reads any other."""
        return self._rule_groups.flags

    def fitting(self, target: Target) -> int:
        """Return the variants for which every rule holds."""
        remaining = self.everything
        for verdicts in self._rule_groups.verdicts(target):
            failing = verdicts.failing(target, remaining)
            remaining = remaining & ~failing if failing else remaining
        return remaining

    def nearest(self, target: Target) -> Variant:
        """Return the variant that comes nearest to fitting; the catalog must not be empty.

        If possible, it is for the target's architecture, and for GPUs if some are passed, else for CPUs. Of
        these, it fails the fewest rules by the smallest distance.
        """
        every = self._rule_groups.verdicts(target)
        pool = (self.everything & ~every[0].failing(target, self.everything)) or self.everything
        wanted = self._for_gpus if target.gpus else ~self._for_gpus
        pool = (pool & wanted) or pool
        mask = next(filter(None, _split_by_failure_count(every, target, pool)))
        for verdicts in reversed(every):
            gaps = verdicts.gaps(target, mask)
            least = min(gap for gap, _ in gaps)
            mask = sum(members for gap, members in gaps if gap == least)
        return self.best(target, mask)

    def group_by_failure_count(self, target: Target, pool: int) -> list[int]:
        """Return the variants of a set that fail no rule, then those that fail one rule, two, and so on."""
        return _split_by_failure_count(self._rule_groups.verdicts(target), target, pool)

    def references(self, mask: int) -> frozenset[str]:
        """Return the references of a set of variants; the same object for the same set."""
        references = self._references.get(mask)
        if references is None:
            references = frozenset([variant.reference for variant in self.members(mask)])
            self._references[mask] = references
        return references

    def ranked(self, target: Target, mask: int) -> list[Variant]:
        """Return the variants of a set, best first."""
        return sorted(self.members(mask), key=lambda variant: make_sort_key(self.criteria, target, variant))

    def differing(self, mask: int) -> dict[str, tuple[str, ...]]:
        """Return the image's own axes in which variants of a set differ; see the function."""
        return find_differing_axes(example for example, members in self._axes if members & mask)

    def best(self, target: Target, mask: int) -> Variant:
        """Return the variant of a set that has the least key of the order."""
        return self.top_ranked(target, mask)[0]

    def top_ranked(self, target: Target, mask: int) -> list[Variant]:
        """Return the variants of a set that the criteria of the order rank first, sorted by reference."""
        key = make_order_key(target), mask
        leading = self._leading.get(key)
        if leading is None:
            if len(self._leading) >= KEPT:
                self._leading.clear()
            leading = self._leading[key] = self._first(target, mask)
        return self.members(leading)

    def _first(self, target: Target, mask: int) -> int:
        for criterion in self.criteria:
            scores = self.scores(criterion, target, mask)
            least = min(score for score, _ in scores)
            mask &= sum(members for score, members in scores if score == least)
        return mask

    def scores(self, criterion: Criterion, target: Target, mask: int) -> list[tuple[Any, int]]:
        """Return the places of a set's variants by a criterion, the less the better.

        Each comes with the variants that have it; they may be in several parts, and others beside them.
        """
        groups = self._criteria[criterion]
        return [(criterion.place(target, example), members) for example, members in groups if members & mask]

    def grouped(self, need: Callable[[Variant], Hashable]) -> list[int]:
        """Return the sets of variants with equal needs."""
        singles = [1 << number for number in range(len(self._variants))]
        return [members for _, members in _group_by_need(need, self._variants, singles).values()]

    def members(self, mask: int) -> list[Variant]:
        """Return the variants of a set, sorted by reference."""
        return [self._variants[bit.bit_length() - 1] for bit in split_mask(mask)]


def split_mask(mask: int) -> Iterator[int]:
    """Yield the members of a set as sets of one member, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest
        mask ^= lowest


def _group_by_need(
    need: Callable[[Variant], Hashable], variants: list[Variant], singles: list[int]
) -> dict[Hashable, Group]:
    """Return a group for each distinct need; `singles` has the mask of each variant alone.

    The masks are made once for all needs: shifting integers of a thousand bits takes longer than grouping.
    """
    groups: dict[Hashable, list[int]] = {}
    for needed, member in zip(map(need, variants), singles, strict=True):
        groups.setdefault(needed, []).append(member)
    return {
        needed: (variants[members[0].bit_length() - 1], sum(members)) for needed, members in groups.items()
    }


def _split_by_failure_count(every: Iterable[Verdicts], target: Target, pool: int) -> list[int]:
    by_failures = [pool]
    for verdicts in every:
        failing = verdicts.failing(target, pool)
        shifted = zip([*by_failures, 0], [0, *by_failures], strict=True)
        by_failures = [(as_many & ~failing) | (one_less & failing) for as_many, one_less in shifted]
    return by_failures


def find_differing_axes(variants: Iterable[Variant]) -> dict[str, tuple[str, ...]]:
    """Return the image's own axes in which `variants` differ, each with its values there.

    A variant without such an axis has the value "" on it.
    """
    present = [dict(axes) for axes in {variant.axes for variant in variants}]
    values = {axis: {other.get(axis, "") for other in present} for axes in present for axis in axes}
    return {
        axis: tuple(sorted(values[axis], key=make_natural_key))
        for axis in sorted(values)
        if len(values[axis]) > 1
    }
