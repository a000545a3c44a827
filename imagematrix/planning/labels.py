"""The labels of an image to be built: those for the selector, and the standard ones."""

from __future__ import annotations

import json

from imagematrix.catalog import labels
from imagematrix.catalog.catalog import UserModeDriver, Variant
from imagematrix.facts import device_code, marches
from imagematrix.matrix.words import HOST_DRIVER
from imagematrix.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.catalog.catalog import Ptx
    from imagematrix.matrix.matrix import Cell
    from imagematrix.planning.plan import Planned

    DeviceCode = tuple[tuple[str, ...], tuple[Ptx, ...]]  # cubins and PTX of a catalog entry

__all__ = ["for_item", "variant"]


def for_item(
    item: Planned,
    flags: frozenset[str],
    facts: tuple[tuple[str, str], ...] = (),
    code: DeviceCode | None = None,
) -> dict[str, str]:
    """Return the labels of `item`'s image; `flags` are the CPU flags its code needs.

    `facts` are the facts of its catalog entry that its bytes prove, and `code` is their device code if it
    differs from the cell's.
    """
    cell = item.cell
    assert item.identity is not None  # noqa: S101 - a planned build has one; for the type checker
    promised = replace(variant(cell, flags, item.reference), facts=facts)
    if code is not None:
        promised = replace(promised, cubins=code[0], ptx=code[1])
    own = {
        labels.IMAGE: cell.image.name,
        labels.VERSION: cell.image.version,
        labels.CELL: cell.id,
        labels.INPUT: item.identity.digest,
        labels.INPUTS: json.dumps(dict(item.identity.components), sort_keys=True, separators=(",", ":")),
        labels.VARIANT: labels.write(promised),
        "org.opencontainers.image.title": cell.image.name,
        "org.opencontainers.image.version": cell.image.version,
    }
    if cell.image.development:
        own[labels.DEVELOPMENT] = "true"
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
    """Return the catalog entry that `cell` promises."""
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
    )


def _driver(cell: Cell) -> UserModeDriver | None:
    if cell.cuda is None:
        return None
    version = cell.axes.get("driver", HOST_DRIVER)
    if version == HOST_DRIVER:
        return UserModeDriver(mode="host")
    return UserModeDriver(mode="exact", version=version)
