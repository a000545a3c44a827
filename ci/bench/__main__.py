"""Measure imagematrix, and compare it with its limits and with the alternatives.

    python ci/bench [--quick] [--large] [--write] [--rounds N] [--pairs N] [--only WORD]

Every number is a median of this run. Limits are ratios, to an alternative or to `python -c pass`, so that
they hold on fast and slow machines. Each row is printed as soon as it is measured. If a group of rows fails,
the reason is printed and the other groups are still measured.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import assigning
import building
import compressing
import daemonless
import matching
import packaged
import planning
import probing
import reviewing
import rootless
import running
import scaling
import selecting
import serving
import upgrading
import verifying
from measure import Pace, Row

from imagematrix import probe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Group = Callable[[Path, Pace], Iterable[Row]]  # functions that measure rows in a folder

# Groups that are measured with --large, or by their name.
LARGE = ("compression", "layers", "official", "tensorflow", "upgrades", "prebuilt", "cluster")
PULLS = 3  # cold starts of each image of a framework
MET = {True: "yes", False: "NO", None: ""}
# Bytecode exists after the first round, as in an installed package; coverage is off.
DROPPED = ("PYTHONDONTWRITEBYTECODE", "COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START")
COLUMNS = {"what": 61, "ours": 15, "ratio": 14, "instead": 38, "limit": 24, "met": 3}


def main() -> int:
    """Measure everything, print each row as soon as it is measured, and return 1 if one failed."""
    asked = _arguments()
    for name in DROPPED:
        os.environ.pop(name, None)
    machine = f"{os.cpu_count()} x {probe(nvml=False).cpu.model}, {platform.system()} {platform.release()}"
    print(f"Python {platform.python_version()}, {machine}\n")
    _print(COLUMNS.keys())
    print(f"|{'|'.join('-' * (width + 2) for width in COLUMNS.values())}|", flush=True)
    failed = False
    with tempfile.TemporaryDirectory() as name:
        for group, measure in _groups(asked).items():
            if asked.only not in group or (group in LARGE and not asked.large and asked.only != group):
                continue
            folder = Path(name, group)
            folder.mkdir()
            try:
                for row in measure(folder, Pace.measure(asked.rounds)):
                    _print((row.what, row.ours, row.ratio, row.instead, row.bar, MET[row.met]))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the other rows are still measured
                failed = True
                _print((f"{group}: FAILED", *[""] * (len(COLUMNS) - 1)))
                traceback.print_exception(error, file=sys.stderr)
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
        "--write",
        action="store_true",
        help="write the tables of `matching` to docs/benchmark-results.md",
    )
    parser.add_argument("--rounds", type=int, default=21, help="fresh processes for each row (default: 21)")
    parser.add_argument("--pairs", type=int, default=5, help="builds that alternate with bake's (default: 5)")
    parser.add_argument(
        "--only", default="", metavar="WORD", help="only groups of rows with WORD in the name"
    )
    return parser.parse_args()


def _groups(asked: argparse.Namespace) -> dict[str, Group]:
    """Return the functions that measure rows, by name.

    Planning comes first: memory inherited from a large parent would count for the process.
    """
    groups: dict[str, Group] = {
        "plan": lambda folder, pace: planning.rows(folder, pace, bake=not asked.quick),
        "start": lambda folder, _: selecting.started(folder, asked.rounds),
        "probe": lambda *_: probing.rows(asked.rounds),
        "select": lambda folder, pace: selecting.decided(folder, pace, asked.rounds),
        "gang": selecting.ganged,
    }
    if asked.quick:
        return groups
    return groups | {
        "cell": building.cell,
        "no-op": building.again,
        "verify": lambda folder, _: verifying.rows(folder, large=asked.large),
        "matching": lambda folder, _: matching.rows(folder, write=asked.write),
        "compression": lambda folder, _: compressing.levels(folder),
        "layers": lambda folder, _: compressing.layers(folder),
        "official": lambda folder, _: packaged.pytorch(folder, PULLS),
        "tensorflow": lambda folder, _: packaged.tensorflow(folder, PULLS),
        "upgrades": lambda folder, _: upgrading.rows(folder),
        "prebuilt": lambda folder, _: packaged.prebuilt(folder, PULLS),
        "run": lambda folder, pace: running.rows(folder, pace, asked.rounds),
        "daemonless": lambda folder, pace: daemonless.rows(folder, pace, asked.rounds),
        "rootless": lambda folder, _: rootless.rows(folder, asked.pairs),
        "resolver": lambda folder, _: serving.rows(folder, asked.pairs),
        "runtime": lambda *_: assigning.rows(asked.rounds),
        "webhook": lambda folder, _: reviewing.rows(folder),
        "cluster": scaling.rows,
        "small": lambda folder, _: building.small(folder, asked.pairs),
        "shipped": lambda folder, _: building.shipped(folder, asked.pairs),
    }


def _print(cells: Iterable[str]) -> None:
    padded = (cell.ljust(width) for cell, width in zip(cells, COLUMNS.values(), strict=True))
    print(f"| {' | '.join(padded)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
