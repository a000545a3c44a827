"""The Candidate: one variant with what every rule says about it."""

from __future__ import annotations

from operator import attrgetter

from imagematrix.record import Record
from imagematrix.selection.rules import RULES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable

    from imagematrix.catalog.catalog import Variant
    from imagematrix.selection.rule import Gap, RuleResult
    from imagematrix.selection.target import Target

__all__ = ["Candidate", "distances", "results", "without"]

# All that tells variants apart; about their own axes no rule speaks.
PARTS = frozenset({"axes"}).union(*(rule.parts for rule in RULES))


class Candidate(Record):
    """One variant as the rules see it; `rank` is its place among those that fit, from 1, or None."""

    variant: Variant
    rank: int | None
    rules: tuple[RuleResult, ...]

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
        }


def results(target: Target, variant: Variant) -> tuple[RuleResult, ...]:
    """Return what every rule that applies to `variant` says about it."""
    return tuple(rule.result(target, variant) for rule in RULES if rule.need(variant) is not None)


def distances(target: Target, variant: Variant) -> tuple[Gap, ...]:
    """Return how far off a variant is, by every rule.

    The last rules come first: they are about hardware, while a driver is changed on a node, or in the last
    layer of an image.
    """
    return tuple(rule.distance(target, variant) for rule in reversed(RULES))


def without(name: str, variant: Variant) -> Hashable:
    """Return all that a variant is, except what another build would change to make the rule `name` hold."""
    return name, _OTHERS[name](variant)


_OTHERS = {rule.name: attrgetter(*sorted(PARTS.difference(rule.parts))) for rule in RULES}
