"""Measure time and memory of planning a matrix of 10,000 cells."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import samples
from measure import Row, duration, processes

from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.plan.plan import PlanContext
from imagematrix.build.plan.planner import plan

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from measure import Extent, Pace

    from imagematrix.build.plan.protocols import StoredVariant

TIME_BAR, MEMORY_BAR = 1.0, 150  # seconds (see measure.REFERENCE), MiB
CELLS, ROUNDS = 10_000, 5


class Store:
    """Stands in for an engine that has every base and no other image."""

    def resolve(self, _reference: str) -> str:
        """Return a digest."""
        return f"sha256:{0:064}"

    def list_variants(self, _image: str, _version: str) -> list[StoredVariant]:
        """Return nothing."""
        return []

    def find_earlier_versions(self, _image: str, _digests: Mapping[str, str]) -> dict[str, str]:
        """Return nothing."""
        return {}


def rows(folder: Path, pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield the plan, and bake's if it is installed and requested."""
    cells = extent.part(CELLS)
    matrix = samples.matrix(folder, cells)
    command = Path(sys.executable).with_name("imagematrix")
    taken = processes(
        {
            "library": (sys.executable, __file__, matrix),
            "command": (command, "plan", "-f", matrix, "--json"),
        },
        extent.times(ROUNDS),
    )
    theirs = _bake(folder, cells) if extent.engines and shutil.which("docker") else None
    for name, what in (
        ("library", f"plan {cells:,} cells: expand, exclude, render, digest"),
        ("command", "`imagematrix plan --json` of them, without an engine"),
    ):
        cost = taken[name]
        yield Row(
            what=what,
            ours=f"{duration(cost.seconds)}, {cost.memory:.0f} MiB",
            ratio=f"{theirs / cost.seconds:.0f} x faster" if theirs else "",
            instead=f"`docker buildx bake --print`: {duration(theirs)}" if theirs else "",
            bar=f"{pace.told(TIME_BAR)}, {MEMORY_BAR} MiB",
            met=cost.seconds <= pace.limit(TIME_BAR) and cost.memory <= MEMORY_BAR,
        )


def _bake(folder: Path, cells: int) -> float:
    command = ("docker", "buildx", "bake", "-f", samples.bake(folder, cells), "--print")
    return processes({"bake": command}, 1, warm=False)["bake"].seconds


if __name__ == "__main__":
    plan(load_matrix(Path(sys.argv[1])), PlanContext(resolve=Store().resolve, store=Store()))  # type: ignore[arg-type] # a plan needs no more
