"""Measure the overhead of `imagematrix run` over docker's own command."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import building
from measure import overhead, pairs
from samples import IMAGEMATRIX

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Engine
    from measure import Extent, Pace, Row

TIME_BAR, PROCESSOR_BAR = 0.080, 0.3  # seconds more than docker's command (see measure.REFERENCE)
INSTEAD = "`docker run`"
NOTHING = ("true",)
MEGABYTES = 100
LINE = "x" * 99  # and its end; with lines of a few bytes, Docker takes minutes for their JSON
OUTPUT = ("sh", "-c", f"yes {LINE} | head -c {MEGABYTES}000000")
OUTPUT_ROUNDS = 5
MATRIX = {
    "schema": "imagematrix.matrix/v1",
    "images": {"bench-run": {"version": "v1", "template": "run.j2", "context": "context"}},
    "axes": {"cuda": ["none"]},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The wall time and CPU time of a command in seconds, including its children."""

    wall: float
    processor: float


def rows(folder: Path, pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield the time of a container that does nothing, and the CPU time of a container that writes a lot."""
    (folder / "templates").mkdir()
    (folder / "context").mkdir()
    (folder / "templates" / "run.j2").write_text("FROM debian:trixie\n")
    (folder / "matrix.yaml").write_text(json.dumps(MATRIX))
    with building.new_engine() as engine:
        building.run(lambda: engine.imagematrix("build", cwd=folder))
        reference = engine.imagematrix("select", "bench-run:v1").stdout.strip()
        ours = (str(IMAGEMATRIX), "run", "--rm", "bench-run:v1")
        theirs = ("docker", "run", "--rm", reference)
        idle = pairs(
            lambda: _taken(engine, (*ours, *NOTHING)).wall,
            lambda: _taken(engine, (*theirs, *NOTHING)).wall,
            extent.rounds,
        )
        yield overhead("`run` of a container that does nothing", idle, INSTEAD, TIME_BAR, pace)
        output = pairs(
            lambda: _taken(engine, (*ours, *OUTPUT)).processor,
            lambda: _taken(engine, (*theirs, *OUTPUT)).processor,
            extent.times(OUTPUT_ROUNDS),
        )
        what = f"processor time of `run`, {MEGABYTES} MB of output"
        yield overhead(what, output, INSTEAD, PROCESSOR_BAR, pace)


def _taken(engine: Engine, words: tuple[str, ...]) -> Taken:
    start = time.perf_counter()
    with subprocess.Popen(
        [*engine.inside, *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=engine.environment
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} exited with {process.returncode}")
    return Taken(wall=time.perf_counter() - start, processor=usage.ru_utime + usage.ru_stime)
