"""What a node that has a variant of an older version still pulls for a newer one."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.selection.rules.device_code import get_served_targets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.build.stores.sizes import SizedImage, Sizes
    from imagematrix.images.catalog.catalog import Catalog, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Predecessor:
    """The variant that a node had before, and the bytes of the new variant's layers that this one lacks."""

    reference: str
    pull: int


def find_predecessors(new: Sizes, old: Sizes) -> list[Predecessor | None]:
    """Return the predecessor of each variant of `new`: the one in `old` that served the same nodes.

    It is the variant of the same cell, or else one for the same hardware: platform, GPU targets and -march.
    Of several, those that have most of the image's own axes in common count, of these those with the same
    driver, and of these the one that leaves the most to pull. None if there is none, or a size is unknown.
    """
    return [_find_predecessor(variant, new.catalog, old) for variant in new.variants]


def _find_predecessor(new: SizedImage[Variant], catalog: Catalog, old: Sizes) -> Predecessor | None:
    variant, cell = new.image, _parse_cell(new.image, catalog)
    same_cell = [sized for sized in old.variants if cell and _parse_cell(sized.image, old.catalog) == cell]
    hardware = _make_hardware_key(variant)
    same_hardware = [sized for sized in old.variants if _make_hardware_key(sized.image) == hardware]
    closest = max((_count_common(variant, sized.image) for sized in same_hardware), default=None)
    near = [sized for sized in same_hardware if _count_common(variant, sized.image) == closest]
    predecessors = [_compare_layers(new, sized) for sized in same_cell or near]
    known = [predecessor for predecessor in predecessors if predecessor is not None]
    if not known or len(known) < len(predecessors):
        return None
    return max(known, key=lambda predecessor: (predecessor.pull, predecessor.reference))


def _compare_layers(new: SizedImage[Variant], old: SizedImage[Variant]) -> Predecessor | None:
    if new.parts is None or old.parts is None or new.compressed != old.compressed:
        return None
    present = {part.digest for part in old.parts}
    layers = {part.digest: part.size for part in new.parts if part.digest not in present}
    return Predecessor(reference=old.image.reference, pull=sum(layers.values()))


def _parse_cell(variant: Variant, catalog: Catalog) -> str | None:
    """Return the cell in a variant's name, IMAGE:VERSION-CELL-INPUT; None if it has another name."""
    begin = f"{catalog.image}:{catalog.version}-"
    cell = variant.reference.removeprefix(begin).rpartition("-")[0]
    return cell if variant.reference.startswith(begin) and cell else None


def _make_hardware_key(variant: Variant) -> Sequence[object]:
    return variant.platform, get_served_targets(variant), variant.march


def _count_common(new: Variant, old: Variant) -> tuple[int, bool]:
    """Return how many own axes have the same value, and whether the driver is the same."""
    return len({*new.axes} & {*old.axes}), new.driver == old.driver
