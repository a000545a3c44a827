"""The Rule: one condition for a variant to fit, with its reason, its remedy and how far off a variant is."""

from __future__ import annotations

from imagematrix.catalog.catalog import CLAIM, UNKNOWN
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
        """Gives the reason of a verdict `ok`; the fix is None if the rule holds."""

        def __call__(self, target: Target, variant: Variant, *, ok: bool) -> Reason:
            """Return need, have, why and fix."""


__all__ = ["Rule", "RuleResult"]

UNDECIDED = "neither bytes nor claims state all needs of the image, and unknown needs rule out no host"


class RuleResult(Record):
    """The result of one rule for one variant. `why` is the reason in one sentence, `fix` the remedy, or None.

    `source` says where the need comes from: "bytes", "claim" or "unknown".
    """

    rule: str
    ok: bool
    need: str
    have: str | None
    why: str
    fix: str | None
    source: str = CLAIM

    def to_json(self) -> dict[str, object]:
        """Return one element of a candidate's `rules`."""
        return {
            "rule": self.rule,
            "ok": self.ok,
            "need": self.need,
            "have": self.have,
            "why": self.why,
            "fix": self.fix,
            "source": self.source,
        }


class Rule(Record):
    """One condition for a variant to fit.

    `facts` are all facts of a host that the functions below read, named as in the Host document:
    "driver.version", or "gpus.compute" of each GPU passed. They identify a kind of hardware: if one is left
    out, a host may get the answer for another. Every reason may also use `Gpu.label`.

    `need` returns everything that `holds` and `gap` read in a variant, or None if the rule does not apply:
    variants with equal needs have the same verdict. The other functions are only called if it applies, and
    `gap` only if the rule does not hold: it returns how far off the variant is, as numbers that compare in
    their order. `parts` are the fields of a variant that another build would change to make the rule hold,
    `fact` the name in its `facts` that says where the need comes from. An unknown fact of a host never counts
    in favour of a variant; an unknown need of a variant never counts against it.
    """

    name: str
    facts: tuple[str, ...]
    parts: tuple[str, ...]
    fact: str
    need: Callable[[Variant], Hashable]
    holds: Callable[[Target, Variant], bool]
    reason: Tell
    gap: Callable[[Target, Variant], Gap]

    def result(self, target: Target, variant: Variant) -> RuleResult:
        """Return the verdict with its reason."""
        source = variant.source(self.fact)
        if self.need(variant) is None:  # or whether it applies is unknown
            return RuleResult(
                rule=self.name, ok=True, need=UNKNOWN, have=None, why=UNDECIDED, fix=None, source=source
            )
        ok = self.holds(target, variant)
        need, have, why, fix = self.reason(target, variant, ok=ok)
        if ok and source == UNKNOWN:
            why = UNDECIDED
        return RuleResult(rule=self.name, ok=ok, need=need, have=have, why=why, fix=fix, source=source)

    def may_apply(self, variant: Variant) -> bool:
        """Whether the rule applies to a variant, or may apply because a fact is unknown."""
        return self.need(variant) is not None or variant.source(self.fact) == UNKNOWN

    def distance(self, target: Target, variant: Variant) -> Gap:
        """Return the gap; if the rule holds or does not apply, an empty one, which is the least."""
        if self.need(variant) is None or self.holds(target, variant):
            return ()
        return self.gap(target, variant)
