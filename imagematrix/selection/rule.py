"""The Rule: one condition for a variant to fit, with its reason, its remedy and how far off a variant is."""

from __future__ import annotations

from imagematrix.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from typing import Protocol

    from imagematrix.catalog.catalog import Variant
    from imagematrix.selection.target import Target

    Gap = tuple[int, ...]
    Reason = tuple[str, str | None, str, str | None]  # need, have, why and fix

    class Tell(Protocol):
        """Gives the reason of a verdict `ok`; the fix is None where the rule holds."""

        def __call__(self, target: Target, variant: Variant, *, ok: bool) -> Reason:
            """Return need, have, why and fix."""


__all__ = ["Rule", "RuleResult"]


class RuleResult(Record):
    """What one rule says about one variant: `why` in one sentence, and in `fix` the remedy, or None."""

    rule: str
    ok: bool
    need: str
    have: str | None
    why: str
    fix: str | None

    def to_json(self) -> dict[str, object]:
        """Return one element of a candidate's `rules`."""
        return {
            "rule": self.rule,
            "ok": self.ok,
            "need": self.need,
            "have": self.have,
            "why": self.why,
            "fix": self.fix,
        }


class Rule(Record):
    """One condition for a variant to fit.

    `facts` are all facts of a host that the functions below read, named as in the Host document:
    "driver.version", or "gpus.compute" of each GPU passed. They identify a kind of hardware: if one is left
    out, a host may get the answer for another. Every reason may also use `Gpu.label`.

    `need` returns everything that `holds` and `gap` read in a variant, or None if the rule does not apply:
    variants with equal needs have the same verdict. The other functions are only called if it applies, and
    `gap` only if the rule does not hold: it returns how far off the variant is, as numbers that compare in
    their order. `parts` are the fields of a variant that another build would change to make the rule hold.
    What is unknown never counts in favour of a variant.
    """

    name: str
    facts: tuple[str, ...]
    parts: tuple[str, ...]
    need: Callable[[Variant], Hashable]
    holds: Callable[[Target, Variant], bool]
    reason: Tell
    gap: Callable[[Target, Variant], Gap]

    def result(self, target: Target, variant: Variant) -> RuleResult:
        """Return the verdict with its reason."""
        ok = self.holds(target, variant)
        need, have, why, fix = self.reason(target, variant, ok=ok)
        return RuleResult(rule=self.name, ok=ok, need=need, have=have, why=why, fix=fix)

    def distance(self, target: Target, variant: Variant) -> Gap:
        """Return the gap, or if the rule holds or does not apply, an empty one, which is less than any."""
        if self.need(variant) is None or self.holds(target, variant):
            return ()
        return self.gap(target, variant)
