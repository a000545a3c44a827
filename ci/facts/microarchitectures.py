"""Write archspec.json from the package archspec: the names that conda's virtual package __archspec has.

Install it first: `pip install archspec`. Rows are in archspec's order of preference: those with the best
generic ancestor, and among them the most specific.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from archspec.cpu import TARGETS  # type: ignore[import-not-found, import-untyped, unused-ignore]

from imagematrix.hardware.host.cpu import IMPLEMENTERS, PARTS
from imagematrix.hardware.vendors import marches

TABLE = Path(__file__).parents[2] / "imagematrix" / "hardware" / "vendors" / "archspec.json"
GENERIC = "generic"
KERNELS = {"sse3": "pni"}  # the name in /proc/cpuinfo
# Nothing that code in user space uses: hypervisors hide them, and compilers know no macro for them.
PRIVILEGED = {"flush_l1d", "tsc_adjust"}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", type=Path, default=TABLE, help="the file to change")
    parser.add_argument("--as-of", required=True, help="the date to record in it")
    arguments = parser.parse_args()
    table = {
        "as_of": arguments.as_of,
        "source": f"the package archspec {version('archspec')} (https://pypi.org/project/archspec)",
        **{arch: rows(arch) for arch in marches.IGNORED},
    }
    arguments.table.write_text(json.dumps(table, indent=1) + "\n")


def rows(arch: str) -> list[dict[str, str | None]]:
    """Return the rows of an architecture, best first."""
    targets = [target for target in TARGETS.values() if str(target.family) == arch]
    if arch == "aarch64":  # archspec cannot tell versions of the architecture either
        targets = [target for target in targets if target.vendor != GENERIC or target.name == arch]
    return [row(target, arch) for target in sorted(targets, key=preference, reverse=True)]


def preference(target: Any) -> tuple[int, bool, int, int]:
    """Return what archspec's `host()` compares, for a sort."""
    generic = max(len(one.ancestors) for one in (target, *target.ancestors) if one.vendor == GENERIC)
    return generic, target.vendor != GENERIC, len(target.ancestors), len(target.features)


def row(target: Any, arch: str) -> dict[str, str | None]:
    """Return the row of a target: its name, the vendor of its CPUs as in marches.py, and the flags it needs.

    A row of an Arm core also has the name of the core, by which the probe calls it.
    """
    vendor = None if target.vendor == GENERIC else marches.get_host_vendor(target.vendor)
    flags = sorted({KERNELS.get(flag, flag) for flag in target.features} - marches.IGNORED[arch] - PRIVILEGED)
    cores = [
        name
        for (implementer, part), name in PARTS.items()
        if (IMPLEMENTERS[implementer].lower(), f"{part:#05x}") == (vendor, target.cpu_part)
    ]
    model = {"model": cores[0]} if cores else {}
    return {"name": target.name, "vendor": vendor, "flags": " ".join(flags), **model}


if __name__ == "__main__":
    main()
