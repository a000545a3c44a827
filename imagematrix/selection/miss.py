"""The Miss: why no variant fits a host, and which comes nearest."""

from __future__ import annotations

from imagematrix.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.selection.rule import RuleResult

__all__ = ["Miss"]


class Miss(Record):
    """Why a host gets no image.

    `why` says it in one sentence, and `fix` what would change it, or None. `nearest` is the reference of the
    variant that comes nearest to fitting, and `rules` are those that it fails.
    """

    why: str
    fix: str | None
    nearest: str | None = None
    rules: tuple[RuleResult, ...] = ()

    @property
    def telling(self) -> tuple[RuleResult, ...]:
        """The rules worth showing: if an image is for another architecture, the others mean nothing."""
        foreign = tuple(rule for rule in self.rules if rule.rule == "platform")
        return foreign or self.rules

    def to_json(self) -> dict[str, object]:
        """Return what the Coverage document says of it."""
        return {
            "nearest": self.nearest,
            "why": self.why,
            "fix": self.fix,
            "rules": [rule.to_json() for rule in self.rules],
        }
