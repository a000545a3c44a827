"""The labels of an image to be built: those for the selector, and the standard ones."""

from __future__ import annotations

import json

from imagematrix.catalog import labels
from imagematrix.catalog.catalog import CLAIM, UserModeDriver, Variant
from imagematrix.facts import device_code, marches
from imagematrix.matrix.words import HOST_DRIVER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.matrix.matrix import Cell
    from imagematrix.planning.plan import Planned


__all__ = ["for_item", "variant"]


def for_item(item: Planned, entry: Variant) -> dict[str, str]:
    """Return the labels of `item`'s image, whose catalog entry is `entry`."""
    cell = item.cell
    assert item.identity is not None  # noqa: S101 - a planned build has one; for the type checker
    own = {
        labels.IMAGE: cell.image.name,
        labels.VERSION: cell.image.version,
        labels.CELL: cell.id,
        labels.INPUT: item.identity.digest,
        labels.INPUTS: json.dumps(dict(item.identity.components), sort_keys=True, separators=(",", ":")),
        labels.VARIANT: labels.write(entry),
        "org.opencontainers.image.title": cell.image.name,
        "org.opencontainers.image.version": cell.image.version,
    }
    if cell.image.development:
        own[labels.DEVELOPMENT] = "true"
    if cell.optional_code:
        own[labels.OPTIONAL] = json.dumps(list(cell.optional_code), separators=(",", ":"))
    if cell.image.prefer:
        own[labels.PREFER] = ",".join(cell.image.prefer)
    if cell.image.defaults:
        own[labels.DEFAULTS] = json.dumps(dict(cell.image.defaults), separators=(",", ":"))
    base = cell.properties.get("base")
    digest = item.identity.components.get(f"base {base}")
    if base and digest:
        own["org.opencontainers.image.base.name"] = base
        own["org.opencontainers.image.base.digest"] = digest
    if cell.cuda:
        own["com.nvidia.cuda.version"] = cell.cuda
    return own


def variant(cell: Cell, flags: frozenset[str], reference: str) -> Variant:
    """Return the catalog entry that `cell` promises; `flags` are the CPU flags its code needs.

    Its only facts are claims: of device code, without which an audit wants to see some, and of CPU flags,
    without which it adds those that code probably needs.
    """
    claims = {"cpu_flags": cell.claims_flags, "cubins": cell.claims_code}
    march, compute = cell.axes.get("march"), cell.axes.get("compute")
    return Variant(
        reference=reference,
        digest=None,
        platform=cell.platform,
        cuda=cell.cuda,
        cubins=(device_code.target(compute),) if compute else (),
        driver=_driver(cell),
        march=march,
        cpu_flags=flags,
        signed_returns=flags >= marches.SIGNING,
        vendor=cell.facts.vendor(march) if march else None,
        oldest_driver=cell.facts.oldest_driver(cell.cuda),
        axes=cell.own_axes,
        facts=tuple((fact, CLAIM) for fact, claimed in claims.items() if claimed),
    )


def _driver(cell: Cell) -> UserModeDriver | None:
    if cell.driver is None:
        return None
    if cell.driver == HOST_DRIVER:
        return UserModeDriver(mode="host")
    return UserModeDriver(mode="exact", version=cell.driver)
