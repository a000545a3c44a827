"""The hosts of a fleet that get no image, grouped by reason."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.common.groups import group_values

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.selection.miss import Miss


@dataclass(frozen=True, slots=True, kw_only=True)
class UnservedHosts:
    """Hosts that nothing fits, all for one reason; `hosts` are their names, sorted."""

    hosts: tuple[str, ...]
    miss: Miss

    def to_json(self) -> dict[str, object]:
        """Return one element of a document's `unserved`."""
        return {"hosts": list(self.hosts), **self.miss.to_json()}


def group_unserved(misses: Iterable[tuple[Miss, Iterable[str]]]) -> tuple[UnservedHosts, ...]:
    """Group the hosts of equal misses, the most hosts first."""
    groups = group_values((miss, name) for miss, names in misses for name in names)
    unserved = [UnservedHosts(hosts=tuple(sorted(names)), miss=miss) for miss, names in groups.items()]
    return tuple(sorted(unserved, key=lambda group: (-len(group.hosts), group.hosts)))
