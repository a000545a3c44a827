"""The hosts that nothing fits: the nearest miss, and what would mend it."""

from __future__ import annotations

from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.selection.selection import RuleResult

__all__ = ["Miss", "Unserved", "gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """Why a host gets no image.

    `nearest` is the reference of the variant that comes nearest, and `rules` are those that it fails. `why`
    says it in one sentence and `fix` what would change it.
    """

    nearest: str | None
    why: str
    fix: str | None
    rules: tuple[RuleResult, ...] = ()

    @property
    def telling(self) -> tuple[RuleResult, ...]:
        """The rules worth telling: what an image for another architecture fails besides says nothing."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Unserved:
    """Hosts that nothing fits, all for one reason; `hosts` are their names, sorted."""

    hosts: tuple[str, ...]
    miss: Miss

    def to_json(self) -> dict[str, object]:
        """Return one element of the Coverage document's `unserved`."""
        return {"hosts": list(self.hosts), **self.miss.to_json()}


def gather(misses: Iterable[tuple[Miss, Iterable[str]]]) -> tuple[Unserved, ...]:
    """Return the hosts of equal misses together, the most hosts first."""
    groups: dict[Miss, list[str]] = {}
    for reason, names in misses:
        groups.setdefault(reason, []).extend(names)
    found = [Unserved(hosts=tuple(sorted(names)), miss=reason) for reason, names in groups.items()]
    return tuple(sorted(found, key=lambda unserved: (-len(unserved.hosts), unserved.hosts)))
