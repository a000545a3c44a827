"""The names of microarchitectures in archspec, which conda's virtual package `__archspec` has.

The table in archspec.json lists them best first. As everywhere here, flags decide what a CPU can run. A name
also says for which CPUs code was tuned, so it needs a CPU of that vendor.
"""

from __future__ import annotations

from imagematrix.hardware.vendors import _data

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet


def find_best_name(
    arch: str, flags: AbstractSet[str], vendor: str | None = None, model: str | None = None
) -> str | None:
    """Return the best name for CPUs with these flags; None if archspec's names for `arch` are unknown here.

    `vendor` is as `marches.get_host_vendor` returns it. `model` is the name of an Arm core ("Neoverse-V2"):
    of cores with the same flags, archspec takes the one that it is.
    """
    rows = [
        row
        for row in _data.load("archspec.json").get(arch, ())
        if row["vendor"] in (None, vendor) and flags >= set(row["flags"].split())
    ]
    names_of_model = (row["name"] for row in rows if model and row.get("model") == model)
    return next(names_of_model, rows[0]["name"] if rows else None)
