"""The variants of a catalog, arranged so that a question is asked once for all variants with equal needs."""

from __future__ import annotations

from operator import attrgetter

from imagematrix.facts.versions import natural
from imagematrix.selection.rules import RULES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from imagematrix.catalog.catalog import Variant
    from imagematrix.selection.node import Node
    from imagematrix.selection.order import Criterion
    from imagematrix.selection.rules import Rule

    Group = tuple[Variant, int]  # a variant with some needs, and the set of all that have the same

__all__ = ["Index", "differing"]


class Index:
    """The variants of a catalog by what each rule and each criterion of the order look at.

    A set of variants is an integer with bit i for variant i: thousands are joined or told apart at once. The
    variants are numbered by their references.
    """

    __slots__ = ("_axes", "_criteria", "_for_gpus", "_rules", "_variants", "criteria", "everything")

    def __init__(self, variants: tuple[Variant, ...], criteria: Sequence[Criterion]) -> None:
        self._variants = sorted(variants, key=lambda variant: variant.reference)
        self.everything = (1 << len(variants)) - 1
        self.criteria = criteria
        asked = [*(rule.needs for rule in RULES), *(criterion.needs for criterion in criteria)]
        alone = [1 << number for number in range(len(variants))]
        groups = {needs: _groups(needs, self._variants, alone) for needs in dict.fromkeys(asked)}
        self._rules = [
            (rule, [group for need, group in groups[rule.needs].items() if need is not None])
            for rule in RULES
        ]
        self._criteria = [(criterion, list(groups[criterion.needs].values())) for criterion in criteria]
        self._axes = list(_groups(attrgetter("axes"), self._variants, alone).values())
        self._for_gpus = sum(1 << number for number, variant in enumerate(self._variants) if variant.gpu)

    def fitting(self, node: Node) -> int:
        """Return the variants for which every rule holds."""
        left = self.everything
        for rule, groups in self._rules:
            left &= ~_failing(rule, groups, node, left)
        return left

    def nearest(self, node: Node) -> Variant:
        """Return the variant of a catalog, not an empty one, that comes nearest to fitting.

        It is for the node's architecture, and for GPUs if it passes some, for CPUs if it passes none, as far
        as there are any such; of these, it fails the fewest rules, and is the least apart.
        """
        platform, platforms = self._rules[0]
        pool = (self.everything & ~_failing(platform, platforms, node, self.everything)) or self.everything
        wanted = self._for_gpus if node.gpus else ~self._for_gpus
        pool = (pool & wanted) or pool
        by_failures = [pool]
        for rule, groups in self._rules:
            failing = _failing(rule, groups, node, pool)
            shifted = zip([*by_failures, 0], [0, *by_failures], strict=True)
            by_failures = [(as_many & ~failing) | (one_less & failing) for as_many, one_less in shifted]
        some = next(filter(None, by_failures))
        for rule, groups in reversed(self._rules):
            gaps = [(rule.gap(node, one), members & some) for one, members in groups if members & some]
            gaps.append(((), some & ~sum(members for _, members in gaps)))
            least = min(gap for gap, members in gaps if members)
            some = sum(members for gap, members in gaps if gap == least)
        return self.best(node, some)

    def differing(self, some: int) -> dict[str, tuple[str, ...]]:
        """Return the axes of the image's own in which variants of a set differ; see the function."""
        return differing(one for one, members in self._axes if members & some)

    def best(self, node: Node, some: int) -> Variant:
        """Return the variant of a set that has the least key of the order."""
        return self.leading(node, some)[0]

    def leading(self, node: Node, some: int) -> list[Variant]:
        """Return those of a set that no criterion of the order puts behind another, by their references."""
        for criterion, groups in self._criteria:
            scores = [(criterion.score(node, one), members) for one, members in groups if members & some]
            least = min(score for score, _ in scores)
            some &= sum(members for score, members in scores if score == least)
        found = []
        while some:
            lowest = some & -some
            found.append(self._variants[lowest.bit_length() - 1])
            some ^= lowest
        return found


def _groups(
    needs: Callable[[Variant], Hashable], variants: list[Variant], alone: list[int]
) -> dict[Hashable, Group]:
    """Return a group for each distinct need; `alone` has for each variant the set of it alone."""
    groups: dict[Hashable, list[int]] = {}
    for need, member in zip(map(needs, variants), alone, strict=True):
        groups.setdefault(need, []).append(member)
    return {need: (variants[members[0].bit_length() - 1], sum(members)) for need, members in groups.items()}


def _failing(rule: Rule, groups: list[Group], node: Node, among: int) -> int:
    """Return the variants for which a rule does not hold, asking only about groups with some in `among`."""
    failing = 0
    for one, members in groups:
        if members & among and not rule.holds(node, one):
            failing |= members
    return failing


def differing(variants: Iterable[Variant]) -> dict[str, tuple[str, ...]]:
    """Return the axes of the image's own in which `variants` differ, each with its values there.

    A variant that has no such axis has the value "" on it.
    """
    present = [dict(axes) for axes in {variant.axes for variant in variants}]
    found = {axis: {own.get(axis, "") for own in present} for own in present for axis in own}
    return {axis: tuple(sorted(found[axis], key=natural)) for axis in sorted(found) if len(found[axis]) > 1}
