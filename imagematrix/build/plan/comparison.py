"""The step of a plan that compares cells with the images in stores."""

from __future__ import annotations

from dataclasses import replace

from imagematrix.build.plan.plan import Difference, Planned, PlanStatus
from imagematrix.common.text import shorten_words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from imagematrix.build.matrix.matrix import Cell
    from imagematrix.build.plan.context import Listing
    from imagematrix.build.plan.identity import Identity
    from imagematrix.build.plan.plan import Dropped, PlanContext
    from imagematrix.build.plan.protocols import Store, StoredVariant

SHOWN = 5  # files listed in a reason


class StoreComparison:
    """Compares cells with the stores of `against`, whose images are listed once.

    `list_context` returns the listing of a context. `lost` are the references of images that were lost.
    """

    def __init__(self, against: PlanContext, list_context: Callable[[Path | None], Listing]) -> None:
        self.lost: set[str] = set()
        self._against = against
        self._list_context = list_context
        self._changed_files: dict[tuple[Path | None, str], tuple[str, ...]] = {}
        self._variants: dict[tuple[int, str], dict[str, list[StoredVariant]]] = {}

    def compare(self, item: Planned) -> Planned:
        """Return `item` with the status of its identity, if any, in the store, or else in the engine."""
        cell, identity = item.cell, item.identity
        if identity is None:
            return item
        variants = self._list_variants(self._against.store, cell)
        identical = _find_identical(variants, cell, identity)
        # A development image is replaced, even under the same reference.
        conflicts = [
            variant
            for variant in variants
            if variant is not identical and variant.reference != item.reference
        ]
        is_replaceable = cell.image.development or all(variant.development for variant in conflicts)
        if identical and not identical.lost and is_replaceable:
            return replace(item, status=PlanStatus.UP_TO_DATE, labels=identical.labels)
        if conflicts and self._against.store:
            existing = conflicts[0]
            difference, why = self._describe_difference(self._against.store, existing, cell, identity)
            if identical:
                why += f", and there are both {identical.reference} and {difference.reference}"
            status = PlanStatus.BUILD if is_replaceable else PlanStatus.REFUSED
            return replace(item, status=status, why=why, difference=difference)
        in_engine = _find_identical(self._list_variants(self._against.engine, cell), cell, identity)
        if in_engine:
            why = "the engine has it, so it is pushed and not built"
            return replace(item, status=PlanStatus.ADOPT, labels=in_engine.labels, why=why)
        return replace(item, why="the registry lost it") if identical else item

    def reuse_earlier_versions(self, items: Sequence[Planned | Dropped]) -> tuple[Planned | Dropped, ...]:
        """Return the items; those whose inputs match an earlier version become ADOPT.

        The store is queried once for each image, because a registry takes several requests for each cell.
        """
        store = self._against.store if self._against.adopts_earlier else None
        if store is None:
            return tuple(items)
        cells: dict[str, dict[str, str]] = {}
        for item in items:
            # No store has an image of this version and cell, or there would be another status or a reason.
            if (
                isinstance(item, Planned)
                and item.identity
                and item.status is PlanStatus.BUILD
                and item.why is None
                and not item.cell.image.development
            ):
                cells.setdefault(item.cell.image.name, {})[item.cell.id] = item.identity.digest
        found = {image: store.find_earlier_versions(image, digests) for image, digests in cells.items()}

        def reuse(item: Planned | Dropped) -> Planned | Dropped:
            earlier = found.get(item.cell.image.name, {}).get(item.cell.id)
            if not isinstance(item, Planned) or not earlier:
                return item
            why = f"the same inputs as {earlier}"
            return replace(item, status=PlanStatus.ADOPT, earlier=earlier, why=why)

        return tuple(map(reuse, items))

    def _describe_difference(
        self, store: Store, existing: StoredVariant, cell: Cell, identity: Identity
    ) -> tuple[Difference, str]:
        """Return how a cell differs from an image in the store, as data and as a sentence."""
        before = store.get_components(existing.reference)
        components = identity.find_changed_components(before)
        files: tuple[str, ...] = ()
        if "context" in components:
            # Many cells share a context. Its files are known if that with the earlier digest was recorded.
            key = cell.image.context, before.get("context", "")
            if key not in self._changed_files:
                recorded = self._against.find_recorded and self._against.find_recorded(key[1])
                self._changed_files[key] = (
                    self._list_context(cell.image.context).find_changed_paths(recorded) if recorded else ()
                )
            files = self._changed_files[key]
        shown = f": {shorten_words(files, SHOWN, more=', …')}" if files else ""
        difference = Difference(existing=existing, components=components, files=files, before=before)
        return difference, f"{', '.join(components)} changed{shown}"

    def _list_variants(self, store: Store | None, cell: Cell) -> list[StoredVariant]:
        if store is None:
            return []
        key = id(store), cell.image.name
        if key not in self._variants:
            by_cell: dict[str, list[StoredVariant]] = {}
            for variant in store.list_variants(cell.image.name, cell.image.version):
                by_cell.setdefault(variant.cell, []).append(variant)
                if variant.lost:
                    self.lost.add(variant.reference)
            self._variants[key] = by_cell
        return self._variants[key].get(cell.id, [])


def _find_identical(variants: list[StoredVariant], cell: Cell, identity: Identity) -> StoredVariant | None:
    """Return the image of the cell that was built from the inputs of this identity, or None.

    A final version has no development images: these have a label that says so, and are never pushed.
    """
    matches = (variant for variant in variants if variant.input_digest == identity.digest)
    return next((variant for variant in matches if cell.image.development or not variant.development), None)
