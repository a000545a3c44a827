"""The labels of an image to be built: those for the selector, and the standard ones."""

from __future__ import annotations

import json

from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import describe_default_order
from imagematrix.images.catalog.warm_up import write_warm_up

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.build.plan.plan import Planned
    from imagematrix.images.catalog.catalog import Variant


def compose_labels(item: Planned, entry: Variant) -> dict[str, str]:
    """Return the labels of `item`'s image, whose catalog entry is `entry`."""
    cell = item.cell
    assert item.identity is not None  # noqa: S101 - a planned build has one; for the type checker
    image_labels = {
        labels.IMAGE: cell.image.name,
        labels.VERSION: cell.image.version,
        labels.CELL: cell.id,
        labels.INPUT: item.identity.digest,
        labels.INPUTS: json.dumps(dict(item.identity.components), sort_keys=True, separators=(",", ":")),
        labels.VARIANT: labels.write_variant(entry),
        "org.opencontainers.image.title": cell.image.name,
        "org.opencontainers.image.version": cell.image.version,
    }
    if cell.image.development:
        image_labels[labels.DEVELOPMENT] = "true"
    if cell.optional_code:
        image_labels[labels.OPTIONAL] = json.dumps(list(cell.optional_code), separators=(",", ":"))
    if cell.image.prefer:
        image_labels[labels.PREFER] = ",".join(cell.image.prefer)
    if cell.image.defaults:
        image_labels[labels.DEFAULTS] = json.dumps(dict(cell.image.defaults), separators=(",", ":"))
    if cell.image.default_order:
        order = describe_default_order(cell.image.default_order)
        image_labels[labels.DEFAULT_ORDER] = json.dumps(order, separators=(",", ":"))
    if cell.warm_up:
        image_labels[labels.WARM_UP] = write_warm_up(cell.warm_up)
    base = cell.properties.get("base")
    digest = item.identity.components.get(f"base {base}")
    if base and digest:
        image_labels["org.opencontainers.image.base.name"] = base
        image_labels["org.opencontainers.image.base.digest"] = digest
    if cell.cuda:
        image_labels["com.nvidia.cuda.version"] = cell.cuda
    return image_labels
