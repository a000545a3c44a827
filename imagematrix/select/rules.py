"""The rules by their names: what of a variant each looks at, when it holds, and what it says."""

from __future__ import annotations

from imagematrix.record import Record
from imagematrix.select import needs, reasons, verdicts
from imagematrix.select.selection import RuleResult

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from imagematrix.catalog.catalog import Variant
    from imagematrix.select.node import Node

__all__ = ["RULES", "Rule", "results"]


class Rule(Record):
    """One condition for a variant to fit.

    `needs` returns all that the rule looks at in a variant, or None where it does not apply: variants with
    equal needs have one verdict on a node.
    """

    name: str
    needs: Callable[[Variant], Hashable]
    holds: Callable[[Node, Variant], bool]
    tell: reasons.Tell

    def result(self, node: Node, variant: Variant) -> RuleResult:
        """Return the verdict with its reason."""
        ok = self.holds(node, variant)
        need, have, why, fix = self.tell(node, variant, ok=ok)
        return RuleResult(rule=self.name, ok=ok, need=need, have=have, why=why, fix=fix)


def results(node: Node, variant: Variant) -> tuple[RuleResult, ...]:
    """Return what every rule that applies to `variant` says about it."""
    return tuple(rule.result(node, variant) for rule in RULES if rule.needs(variant) is not None)


RULES = (
    Rule(name="platform", needs=needs.platform, holds=verdicts.platform, tell=reasons.platform),
    Rule(name="driver-exact", needs=needs.exact, holds=verdicts.driver_exact, tell=reasons.driver_exact),
    Rule(name="driver-compat", needs=needs.compat, holds=verdicts.driver_compat, tell=reasons.driver_compat),
    Rule(name="driver-cuda", needs=needs.cuda, holds=verdicts.driver_cuda, tell=reasons.driver_cuda),
    Rule(name="device-code", needs=needs.code, holds=verdicts.device_code, tell=reasons.device_code),
    Rule(name="fatbin", needs=needs.fatbin, holds=verdicts.fatbin, tell=reasons.fatbin),
    Rule(name="cpu", needs=needs.cpu, holds=verdicts.cpu, tell=reasons.cpu),
)
