"""The hosts that nothing fits, grouped by the reason."""

from __future__ import annotations

from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.selection.miss import Miss

__all__ = ["Unserved", "gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unserved:
    """Hosts that nothing fits, all for one reason; `hosts` are their names, sorted."""

    hosts: tuple[str, ...]
    miss: Miss

    def to_json(self) -> dict[str, object]:
        """Return one element of the Coverage document's `unserved`."""
        return {"hosts": list(self.hosts), **self.miss.to_json()}


def gather(misses: Iterable[tuple[Miss, Iterable[str]]]) -> tuple[Unserved, ...]:
    """Group the hosts of equal misses, the most hosts first."""
    groups: dict[Miss, list[str]] = {}
    for miss, names in misses:
        groups.setdefault(miss, []).extend(names)
    unserved = [Unserved(hosts=tuple(sorted(names)), miss=miss) for miss, names in groups.items()]
    return tuple(sorted(unserved, key=lambda one: (-len(one.hosts), one.hosts)))
