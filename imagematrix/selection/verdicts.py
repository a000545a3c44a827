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

    Group = tuple[Variant, int]  # a variant, and the mask of all variants with the same needs
    Decided = Sequence[tuple[Rule, Sequence[Group]]]  # what each rule decides on

KEPT = 256  # kinds of targets that a group keeps verdicts for
NOTHING = (0, 0)


class Verdicts:
    """The verdicts of one rule for targets with equal facts, made when they are asked for.

    Thread-safe: what is known is swapped atomically, so at worst a verdict is computed twice.
    """

    __slots__ = ("_gaps", "_groups", "_known", "_rule")

    def __init__(self, rule: Rule, groups: Sequence[Group]) -> None:
        self._rule = rule
        self._groups = groups
        self._known = NOTHING  # the variants with a verdict, and the ones for which the rule does not hold
        self._gaps: dict[int, Distance] | None = None  # by the place of a group; few targets need any

    def failing(self, target: Target, among: int) -> int:
        """Return variants for which the rule does not hold: all of those `among` these, and maybe others."""
        known, failing = self._known
        new = among & ~known if known else among  # equal masks of many targets are one object
        if new:
            for example, members in self._groups:
                if members & new and not self._rule.is_satisfied(target, example):
                    failing = failing | members if failing else members
            self._known = known | new if known else new, failing
        return failing

    def gaps(self, target: Target, among: int) -> list[tuple[Distance, int]]:
        """Return how far off the rule is for the variants `among` these, in parts that have none in common.

        The least gap is that of variants for which the rule holds, or to which it does not apply.
        """
        found: list[tuple[Distance, int]] = []
        if self._gaps is None:
            self._gaps = {}
        for number, (example, members) in enumerate(self._groups):
            own = members & among
            if own:
                gap = self._gaps.get(number)
                if gap is None:
                    gap = self._gaps[number] = self._rule.refusal_distance(target, example)
                found.append((gap, own))
                among ^= own
        return [*found, ((), among)] if among else found


class RuleGroups:
    """The verdicts of all rules. Rules that share a fact, directly or by way of others, are one group."""

    __slots__ = ("_order", "_rule_groups", "flags")

    def __init__(self, decided: Decided) -> None:
        """Take what each rule decides on."""
        self.flags = _collect_compared_flags(decided)
        groups = _group_rules_by_facts([rule for rule, _ in decided])
        self._rule_groups = [
            _RuleGroup([decided[place] for place in places], self.flags) for places in groups
        ]
        order = [place for places in groups for place in places]
        self._order = sorted(range(len(order)), key=order.__getitem__)

    def verdicts(self, target: Target) -> list[Verdicts]:
        """Return the verdicts of each rule."""
        found = [verdicts for group in self._rule_groups for verdicts in group.verdicts(target)]
        return [found[place] for place in self._order]


class _RuleGroup:
    __slots__ = ("_decided", "_kept", "_read")

    def __init__(self, decided: Decided, flags: frozenset[str]) -> None:
        self._decided = decided
        self._read = make_fact_key((fact for rule, _ in decided for fact in rule.facts), flags)
        self._kept: dict[Hashable, tuple[Verdicts, ...]] = {}

    def verdicts(self, target: Target) -> tuple[Verdicts, ...]:
        key = self._read(target)
        verdicts = self._kept.get(key)
        if verdicts is None:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            verdicts = self._kept[key] = tuple([Verdicts(rule, groups) for rule, groups in self._decided])
        return verdicts


def _group_rules_by_facts(rules: Sequence[Rule]) -> list[list[int]]:
    """Return the places of rules that share facts, directly or by way of others."""
    groups: list[tuple[set[str], list[int]]] = []
    for place, rule in enumerate(rules):
        facts, places = {*rule.facts}, [place]
        for group in [group for group in groups if group[0] & facts]:
            facts |= group[0]
            places = [*group[1], *places]
            groups.remove(group)
        groups.append((facts, places))
    return [places for _, places in groups]


def _collect_compared_flags(decided: Decided) -> frozenset[str]:
    """Return the CPU flags that rules compare."""
    reading = [(rule, groups) for rule, groups in decided if FLAGS in rule.facts]
    thresholds = [
        rule.thresholds(example).get(FLAGS, ()) for rule, groups in reading for example, _ in groups
    ]
    return frozenset(str(flag) for flags in thresholds for flag in flags)
