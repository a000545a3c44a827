"""Measure imagematrix, and compare it with its limits and with the alternatives.

    python ci/bench [--quick] [--large] [--smallest] [--write] [--rounds N] [--pairs N] [--only WORD]

Every number is a median of this run. Limits are ratios, to an alternative or to `python -c pass`, so that
they hold on fast and slow machines. Each row is printed as soon as it is measured. If a group of rows fails,
the reason is printed and the other groups are still measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import assigning
import building
import caching
import compressing
import daemonless
import matching
import packaged
import planning
import probing
import results
import reviewing
import rootless
import running
import scaling
import selecting
import serving
import unpacking
import upgrading
import verifying
from disk import new_disk
from measure import Extent, Pace, Row, cells

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Group = Callable[[Path, Pace, Extent], Iterable[Row]]  # measures rows in a folder

# Planning comes first: memory inherited from a large parent would count for the process.
QUICK: dict[str, Group] = {
    "plan": planning.rows,
    "start": selecting.started,
    "probe": probing.rows,
    "select": selecting.decided,
    "gang": selecting.ganged,
}
GROUPS: dict[str, Group] = QUICK | {
    "cell": building.cell,
    "no-op": building.again,
    "verify": verifying.rows,
    "matching": matching.rows,
    "compression": compressing.levels,
    "layers": compressing.layers,
    "unpacks": unpacking.rows,
    "official": packaged.pytorch,
    "tensorflow": packaged.tensorflow,
    "upgrades": upgrading.rows,
    "prebuilt": packaged.prebuilt,
    "warm": caching.rows,
    "run": running.rows,
    "daemonless": daemonless.rows,
    "rootless": rootless.rows,
    "resolver": serving.rows,
    "runtime": assigning.rows,
    "webhook": reviewing.rows,
    "cluster": scaling.rows,
    "small": building.small,
    "shipped": building.shipped,
}
# Groups that are measured with --large, or by their name.
LARGE = (
    "compression",
    "layers",
    "unpacks",
    "official",
    "tensorflow",
    "upgrades",
    "prebuilt",
    "warm",
    "cluster",
)
PULLS = 3  # cold starts of each image of a framework
# Bytecode exists after the first round, as in an installed package; coverage is off.
DROPPED = ("PYTHONDONTWRITEBYTECODE", "COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START")
COLUMNS = {"what": 61, "ours": 15, "ratio": 14, "instead": 38, "limit": 24, "met": 3}


def main() -> int:
    """Measure everything, print each row as soon as it is measured, and return 1 if a group failed."""
    asked = _arguments()
    for name in DROPPED:
        os.environ.pop(name, None)
    origin = results.Origin.here()
    results.require_places(GROUPS)
    extent = _extent(asked)
    print(f"Commit {origin.commit}, {origin.machine}\n")
    _print(COLUMNS.keys())
    print(f"|{'|'.join('-' * (width + 2) for width in COLUMNS.values())}|", flush=True)
    failed = False
    with tempfile.TemporaryDirectory() as name:
        for group in filter(partial(_is_asked, asked), GROUPS):
            folder = Path(name, group)
            folder.mkdir()
            try:
                pace = Pace.measure(extent.rounds)
                rows = []
                with nullcontext() if group in QUICK else new_disk(folder):
                    for row in GROUPS[group](folder, pace, extent):
                        rows.append(replace(row, met=None) if asked.smallest else row)
                        _print(cells(rows[-1]))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the other groups are still measured
                failed = True
                _print((f"{group}: FAILED", *[""] * (len(COLUMNS) - 1)))
                traceback.print_exception(error, file=sys.stderr)
            else:
                if asked.write:
                    results.write(group, origin, pace, rows)
    return int(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure imagematrix and compare it with its limits.")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="leave out engines, downloads and `docker buildx bake`, which take minutes",
    )
    parser.add_argument(
        "--large",
        action="store_true",
        help="verify layers of 5.8 GB, which are downloaded (default: 0.9 GB), compare compression, "
        "and build images of packaged frameworks, which takes 50 GB of disk and npm; such a group is also "
        "measured if --only has its whole name",
    )
    parser.add_argument(
        "--smallest",
        action="store_true",
        help="see that the groups run, once, with a hundredth of nodes, cells and variants; judge no time",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the tables of the groups, each with its commit, to docs/benchmark-results.md",
    )
    parser.add_argument("--rounds", type=int, default=21, help="fresh processes for each row (default: 21)")
    parser.add_argument("--pairs", type=int, default=5, help="builds that alternate with bake's (default: 5)")
    parser.add_argument(
        "--only", default="", metavar="WORD", help="only groups of rows with WORD in the name"
    )
    asked = parser.parse_args()
    if asked.smallest and asked.write:
        parser.error("--smallest measures nothing that could be written")
    return asked


def _extent(asked: argparse.Namespace) -> Extent:
    if asked.smallest:
        return Extent(rounds=1, pairs=1, pulls=1, engines=False, smallest=True)
    return Extent(
        rounds=asked.rounds, pairs=asked.pairs, pulls=PULLS, engines=not asked.quick, large=asked.large
    )


def _is_asked(asked: argparse.Namespace, group: str) -> bool:
    if asked.quick and group not in QUICK:
        return False
    return asked.only in group and (group not in LARGE or asked.large or asked.only == group)


def _print(row: Iterable[str]) -> None:
    padded = (cell.ljust(width) for cell, width in zip(row, COLUMNS.values(), strict=True))
    print(f"| {' | '.join(padded)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
