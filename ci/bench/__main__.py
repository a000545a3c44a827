"""Prints what imagematrix takes, beside its bars and beside what one would use instead.

    python ci/bench [--quick] [--rounds N]

Every number is a median of this one run. A ratio holds on other machines too, a time does not.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import building
import choosing
import planning
import probing

from imagematrix import probe

if TYPE_CHECKING:
    from collections.abc import Iterable

    from measure import Row

MET = {True: "yes", False: "NO", None: ""}
# Bytecode is there after the first round, as it is where a package is installed, and nothing is counted.
DROPPED = ("PYTHONDONTWRITEBYTECODE", "COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START")
COLUMNS = ("what", "ours", "ratio", "instead", "bar", "met")


def main() -> None:
    """Measure everything, and print the table."""
    parser = argparse.ArgumentParser(description="Measure imagematrix against its bars.")
    parser.add_argument(
        "--quick", action="store_true", help="leave out builds and `docker buildx bake`, which take minutes"
    )
    parser.add_argument("--rounds", type=int, default=21, help="fresh processes for each row (default: 21)")
    asked = parser.parse_args()
    for name in DROPPED:
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Planning comes first: what a process inherits from a large parent counts as its own memory.
        planned = list(planning.rows(folder, bake=not asked.quick))
        started = list(choosing.started(folder, asked.rounds))
        probed = list(probing.rows(asked.rounds))
        decided = list(choosing.decided(folder, asked.rounds))
        built = [] if asked.quick or not building.possible() else list(building.rows(folder))
    machine = f"{os.cpu_count()} x {probe(nvml=False).cpu.model}, {platform.system()} {platform.release()}"
    print(f"Python {platform.python_version()}, {machine}\n")
    print("\n".join(_table(chain(started, decided, probed, planned, built))))


def _table(rows: Iterable[Row]) -> list[str]:
    cells = [COLUMNS] + [(row.what, row.ours, row.ratio, row.instead, row.bar, MET[row.met]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |"
        for line in cells
    ]
    return [lines[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines[1:]]


if __name__ == "__main__":
    main()
