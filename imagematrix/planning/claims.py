"""The catalog entries that cells promise before anything is built, as far as the shipped tables know."""

from __future__ import annotations

from imagematrix.catalog.catalog import UNKNOWN
from imagematrix.facts import marches
from imagematrix.matrix.feasibility import ANY_COMPILER
from imagematrix.planning import labels
from imagematrix.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.catalog.catalog import Variant
    from imagematrix.matrix.matrix import Cell

__all__ = ["claim", "name"]


def name(image: str, version: str, cell: str) -> str:
    """Return the reference of a cell's image without an input digest, which is the same for every build."""
    return f"{image}:{version}-{cell}"


def claim(cell: Cell) -> Variant:
    """Return what `cell` promises; its reference is that of `name`.

    CPU flags are those of the table for its compiler, or for GCC if only the image has one. What no table
    knows is unknown, as is the device code of a cell for GPUs that names no compute capability.
    """
    march = cell.axes.get("march")
    flags = cell.facts.flags(march) if march else frozenset()
    if march and flags is None:
        flags = marches.required(march, cell.properties.get("compiler") or ANY_COMPILER)
    reference = name(cell.image.name, cell.image.version, cell.id)
    promised = labels.variant(cell, flags or frozenset(), reference)
    unknown = {"cpu_flags": UNKNOWN} if flags is None else {}
    if cell.cuda and "compute" not in cell.axes and not cell.claims_code:
        unknown["cubins"] = UNKNOWN
    return replace(promised, facts=tuple(sorted({**dict(promised.facts), **unknown}.items())))
