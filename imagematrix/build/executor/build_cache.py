"""Layers of earlier builds that the store still has, so that BuildKit need not export them again.

What earlier builds noted is in the user's cache, and may be outdated. A store takes no image that lacks a
layer, so a wrong note costs only time.
"""

from __future__ import annotations

from dataclasses import astuple

from imagematrix.build.executor.image_rewriter import RewrittenLayer
from imagematrix.build.plan.identity import EPOCH
from imagematrix.common.image_reference import DIGEST
from imagematrix.images.catalog import labels
from imagematrix.images.oci.compression import get_library

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from imagematrix.audit.images.cache import Cache
    from imagematrix.build.plan.protocols import BuildRequest, Store

# The note about a base: the digests of its layers.
BASE: type[tuple[str, ...]] = tuple[str, ...]
# The note about a cell: the reference of its image, and the fields of each Rewritten layer.
CELL: type[tuple[str, tuple[tuple[str, str, int, str], ...]]] = tuple[
    str, tuple[tuple[str, str, int, str], ...]
]


class BuildCache:
    """The layers that builds of bases and cells had, of which no byte is needed any more; thread-safe."""

    def __init__(self, notes: Cache, store: Store) -> None:
        self._notes = notes
        self._store = store

    def find_base_layers(self, base: str, source: str, sibling_references: Iterable[str]) -> tuple[str, ...]:
        """Return the digests of a base's layers, the lowest first; none if the bytes of one are needed.

        `base` is a name of the base that never moves, as it was given to `note_base`, and `source` is where
        builds find it. `sibling_references` are the references of images that are built on it.
        """
        layers = self._notes.get_note(BASE, base) or ()
        known = all(map(self._notes.has_layer, layers)) and self._store.has_base(
            source, layers, sibling_references
        )
        return layers if known else ()

    def note_base(self, base: str, layers: Sequence[str]) -> None:
        """Note the digests of the layers of a base."""
        self._notes.put_note(base, tuple(layers))

    def find_cell_layers(self, order: BuildRequest) -> tuple[RewrittenLayer, ...]:
        """Return the layers that the store has from the last build of this order's cell, or of any cell."""
        layers: list[RewrittenLayer] = []
        for note in {self._notes.get_note(CELL, name) for name in _note_names(order)}:
            image, rows = note or ("", ())
            existing = self._store.list_layers(image) if note else ()
            layers += (
                RewrittenLayer(exported=exported, digest=digest, size=size, diff_id=diff_id)
                for exported, digest, size, diff_id in rows
                if diff_id in existing and DIGEST.fullmatch(exported) and self._notes.has_layer(digest)
            )
        return tuple(layers)

    def note_cell(self, order: BuildRequest, layers: Sequence[RewrittenLayer]) -> None:
        """Note the layers of an order's image, which the store has now, above those of its base."""
        for name in _note_names(order):
            self._notes.put_note(name, (order.reference, tuple(map(astuple, layers))))


def _note_names(order: BuildRequest) -> tuple[str, str]:
    """Return the names of notes about the last build of a cell, and of any cell of its image.

    They are the same for all versions, if the same code writes the layers.
    """
    image, _, tag = order.reference.rpartition(":")
    compression = order.compression
    any_cell = f"{image} {order.sources.platform} {compression} {get_library(compression)} {EPOCH}"
    return f"{any_cell} {labels.get_cell(tag)}", any_cell
