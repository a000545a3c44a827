"""The rules by their names: what of a variant each looks at, when it holds, and what it says."""

from __future__ import annotations

from imagematrix.record import Record
from imagematrix.selection import gaps, needs, reasons, verdicts
from imagematrix.selection.selection import RuleResult

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from imagematrix.catalog.catalog import Variant
    from imagematrix.selection.node import Node

__all__ = ["RULES", "Rule", "apart", "results", "without"]


class Rule(Record):
    """One condition for a variant to fit.

    `needs` returns all that the rule looks at in a variant, or None where it does not apply: variants with
    equal needs have one verdict on a node. `parts` are the PARTS of a variant that another build would change
    to make it hold. `far` says how far off a variant is for which it does not.
    """

    name: str
    parts: tuple[str, ...]
    needs: Callable[[Variant], Hashable]
    holds: Callable[[Node, Variant], bool]
    tell: reasons.Tell
    far: Callable[[Node, Variant], tuple[int, ...]]

    def result(self, node: Node, variant: Variant) -> RuleResult:
        """Return the verdict with its reason."""
        ok = self.holds(node, variant)
        need, have, why, fix = self.tell(node, variant, ok=ok)
        return RuleResult(rule=self.name, ok=ok, need=need, have=have, why=why, fix=fix)

    def gap(self, node: Node, variant: Variant) -> tuple[int, ...]:
        """Return how far off a variant is: nothing where the rule holds, which is less than anything."""
        if self.needs(variant) is None or self.holds(node, variant):
            return ()
        return self.far(node, variant)


def results(node: Node, variant: Variant) -> tuple[RuleResult, ...]:
    """Return what every rule that applies to `variant` says about it."""
    return tuple(rule.result(node, variant) for rule in RULES if rule.needs(variant) is not None)


def apart(node: Node, variant: Variant) -> tuple[tuple[int, ...], ...]:
    """Return how far off a variant is, by every rule.

    The last rules come first: they are about hardware, while a driver is changed on a node, or in the last
    layer of an image.
    """
    return tuple(rule.gap(node, variant) for rule in reversed(RULES))


def without(rule: str, variant: Variant) -> Hashable:
    """Return all that a variant is, but for what another build would change to make a rule hold."""
    return rule, *(getattr(variant, part) for part in PARTS if part not in BY_NAME[rule].parts)


# All that makes one variant another than the next.
PARTS = (
    "platform",
    "cuda",
    "cubins",
    "ptx",
    "compressed_fatbin",
    "driver",
    "cpu_flags",
    "signed_returns",
    "axes",
)
RULES = (
    Rule(
        name="platform",
        parts=("platform",),
        needs=needs.platform,
        holds=verdicts.platform,
        tell=reasons.platform,
        far=gaps.platform,
    ),
    Rule(
        name="driver-exact",
        parts=("driver",),
        needs=needs.exact,
        holds=verdicts.driver_exact,
        tell=reasons.driver_exact,
        far=gaps.driver_exact,
    ),
    Rule(
        name="driver-compat",
        parts=("driver",),
        needs=needs.compat,
        holds=verdicts.driver_compat,
        tell=reasons.driver_compat,
        far=gaps.driver_compat,
    ),
    Rule(
        name="driver-gpu",
        parts=("driver",),
        needs=needs.gpu_driver,
        holds=verdicts.driver_gpu,
        tell=reasons.driver_gpu,
        far=gaps.driver_gpu,
    ),
    Rule(
        name="driver-cuda",
        parts=("cuda",),
        needs=needs.cuda,
        holds=verdicts.driver_cuda,
        tell=reasons.driver_cuda,
        far=gaps.driver_cuda,
    ),
    Rule(
        name="device-code",
        parts=("cubins", "ptx"),
        needs=needs.code,
        holds=verdicts.device_code,
        tell=reasons.device_code,
        far=gaps.device_code,
    ),
    Rule(
        name="fatbin",
        parts=("compressed_fatbin",),
        needs=needs.fatbin,
        holds=verdicts.fatbin,
        tell=reasons.fatbin,
        far=gaps.fatbin,
    ),
    Rule(
        name="cpu",
        parts=("cpu_flags", "signed_returns"),
        needs=needs.cpu,
        holds=verdicts.cpu,
        tell=reasons.cpu,
        far=gaps.cpu,
    ),
)
BY_NAME = {rule.name: rule for rule in RULES}
