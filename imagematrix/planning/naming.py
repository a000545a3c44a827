"""Names of cells in messages."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from imagematrix.planning.plan import Dropped, Planned

__all__ = ["naming"]


def naming(items: Iterable[Planned | Dropped]) -> Callable[[Planned | Dropped], str]:
    """Return a function that names an item by its cell, with its image if `items` have several images."""
    images = {(item.cell.image.name, item.cell.image.version) for item in items}
    if len(images) > 1:
        return lambda item: f"{item.cell.image.name}:{item.cell.image.version} {item.cell.id}"
    return lambda item: item.cell.id
