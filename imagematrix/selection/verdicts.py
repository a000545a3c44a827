"""The verdicts of rules on groups of variants, each made once for all targets that the rule can't tell apart.

Rules that share no fact decide independently of each other: two hosts with the same GPUs and drivers have the
same verdicts of all rules about these, whatever their CPUs are. So verdicts are kept for each set of rules
that share facts.
"""

from __future__ import annotations

from imagematrix.selection.hardware_key import FLAGS, make_fact_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.rule import Distance, Rule
    from imagematrix.selection.selection_target import Target

    VariantSet = int  # a mask: see `variant_index`
    Group = tuple[Variant, VariantSet]  # a variant, and all variants with the same needs
    GroupsByRule = Sequence[tuple[Rule, Sequence[Group]]]  # what each rule decides on

KEPT = 256  # kinds of targets that a group keeps verdicts for
NOTHING = (0, 0)


class Verdicts:
    """The verdicts of one rule for targets with equal facts, each computed when it is first needed.

    Thread-safe: what is known is swapped atomically, so at worst a verdict is computed twice.
    """

    __slots__ = ("_gaps", "_groups", "_known", "_rule")

    def __init__(self, rule: Rule, groups: Sequence[Group]) -> None:
        self._rule = rule
        self._groups = groups
        self._known = NOTHING  # the variants with a verdict, and the ones for which the rule does not hold
        self._gaps: dict[int, Distance] | None = None  # by the index of a group; few targets need any

    def find_failing(self, target: Target, among: VariantSet) -> VariantSet:
        """Return variants for which the rule does not hold: all of those `among` these, and maybe others."""
        known, failing = self._known
        new = among & ~known if known else among  # equal masks of many targets are one object
        if new:
            for example, members in self._groups:
                if members & new and not self._rule.is_satisfied(target, example):
                    failing = failing | members if failing else members
            self._known = known | new if known else new, failing
        return failing

    def measure_gaps(self, target: Target, among: VariantSet) -> list[tuple[Distance, VariantSet]]:
        """Return how far off the rule is for the variants `among` these, in parts that have none in common.

        The least gap is that of variants for which the rule holds, or to which it does not apply.
        """
        gaps: list[tuple[Distance, VariantSet]] = []
        if self._gaps is None:
            self._gaps = {}
        for index, (example, members) in enumerate(self._groups):
            part = members & among
            if part:
                gap = self._gaps.get(index)
                if gap is None:
                    gap = self._gaps[index] = self._rule.measure_refusal(target, example)
                gaps.append((gap, part))
                among ^= part
        return [*gaps, ((), among)] if among else gaps


class RuleGroups:
    """The verdicts of all rules. Rules that share a fact, directly or by way of others, are one group."""

    __slots__ = ("_order", "_rule_groups", "facts", "flags")

    def __init__(self, groups_by_rule: GroupsByRule) -> None:
        """Take what each rule decides on."""
        # What the rules read of a host, and the CPU flags that they compare.
        self.facts = frozenset(fact for rule, _ in groups_by_rule for fact in rule.facts)
        self.flags = frozenset(
            str(flag)
            for rule, groups in groups_by_rule
            if FLAGS in rule.facts
            for example, _ in groups
            for flag in rule.list_compared_values(example, FLAGS)
        )
        rule_groups = _group_rules_by_facts([rule for rule, _ in groups_by_rule])
        self._rule_groups = [
            _RuleGroup([groups_by_rule[index] for index in indices], self.flags) for indices in rule_groups
        ]
        # Verdicts come group by group, and are returned in the order of the rules.
        order = [index for indices in rule_groups for index in indices]
        self._order = sorted(range(len(order)), key=order.__getitem__)

    def get_verdicts(self, target: Target) -> list[Verdicts]:
        """Return the verdicts of each rule."""
        by_group = [verdicts for group in self._rule_groups for verdicts in group.get_verdicts(target)]
        return [by_group[index] for index in self._order]


class _RuleGroup:
    __slots__ = ("_groups_by_rule", "_kept", "_make_key")

    def __init__(self, groups_by_rule: GroupsByRule, flags: frozenset[str]) -> None:
        self._groups_by_rule = groups_by_rule
        self._make_key = make_fact_key((fact for rule, _ in groups_by_rule for fact in rule.facts), flags)
        self._kept: dict[Hashable, tuple[Verdicts, ...]] = {}

    def get_verdicts(self, target: Target) -> tuple[Verdicts, ...]:
        key = self._make_key(target)
        verdicts = self._kept.get(key)
        if verdicts is None:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            verdicts = tuple([Verdicts(rule, groups) for rule, groups in self._groups_by_rule])
            self._kept[key] = verdicts
        return verdicts


def _group_rules_by_facts(rules: Sequence[Rule]) -> list[list[int]]:
    """Return the indices of rules that share facts, directly or by way of others."""
    groups: list[tuple[set[str], list[int]]] = []
    for index, rule in enumerate(rules):
        facts, indices = {*rule.facts}, [index]
        for group in [group for group in groups if group[0] & facts]:
            facts |= group[0]
            indices = [*group[1], *indices]
            groups.remove(group)
        groups.append((facts, indices))
    return [indices for _, indices in groups]
