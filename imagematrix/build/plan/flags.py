"""The CPU flags that a march needs: from the compiler in a template's stage, or from the shipped table."""

from __future__ import annotations

from imagematrix.build.dockerfile.dockerfile import has_stage
from imagematrix.errors import UsageError
from imagematrix.hardware.vendors import marches

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.build.matrix.matrix import Cell

STAGE = "compiler"  # the stage of a template that has the compiler of its code


def require_flag_source(cell: Cell, dockerfile: str) -> None:
    """Raise UsageError if neither a stage of its Dockerfile nor the table has the flags of a cell."""
    march = cell.axes.get("march")
    if march and not has_stage(dockerfile, STAGE):
        look_up_flags(cell, march)


def look_up_flags(cell: Cell, march: str) -> frozenset[str]:
    """Return the flags that the matrix states for a march, or the table for the property `compiler`."""
    flags = cell.facts.get_flags(march)
    if flags is None:
        flags = marches.get_required_flags(march, cell.properties.get("compiler", ""))
    if flags is None:
        raise UsageError(
            "the CPU flags of its march are unknown",
            remedy=f"name the template's stage that has the compiler {STAGE!r}, "
            "or give the cell a property `compiler` such as gcc-14",
        )
    return flags
