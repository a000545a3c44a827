"""Compare builds with `docker buildx` on the same Dockerfiles. Starts an engine and a registry."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import samples
from measure import Row, duration, overhead, pairs

# Appended, because some modules here have the same names.
sys.path += [str(samples.ROOT / "tests" / "engine"), str(samples.ROOT / "tests" / "doubles")]
from conftest import Engine, Registry  # the engines of the tests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from gpu_node import GpuNode
    from measure import Extent, Pace

PORT = 5099
VARIANTS = 100
AGAIN_BAR, CELL_BAR = 0.5, 0.060  # seconds (see measure.REFERENCE)
SMALL_BAR, SHIPPED_BAR = 2.0, 0.95  # times bake
CELLS = 12
ONE = "march=x86-64-v2"  # the cells of the shipped matrix with this march: one, for the CPU
LOCK = "imagematrix.lock"
ROUNDS = 7
SETTLING_S = 2.0
SMALL = "FROM debian:trixie\nRUN echo {{ number }} {{ salt }} > /number\n"


@contextlib.contextmanager
def new_engine(node: GpuNode | None = None, store: str = "containerd") -> Iterator[Engine]:
    """Start an engine for one measurement, on a simulated node if one is given; `store` may be "classic".

    After `docker buildx bake`, an engine is busy for seconds.
    """
    subprocess.run([samples.ROOT / "ci" / "bases", "archives"], check=True)
    engine = Engine(store, node)
    try:
        engine.start()
        engine.seed()
        # It is still busy with these images, which would count against what is measured first.
        os.sync()
        time.sleep(SETTLING_S)
        yield engine
    finally:
        engine.remove()


def cell(folder: Path, pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield the overhead for the build of one cell."""
    cells = extent.part(CELLS)
    _matrix(folder, "bench-cell", cells, salt="ours")
    theirs = []
    with new_engine() as engine:
        said = engine.imagematrix("build", "--jobs", "1", "--json", cwd=folder)
        ours = median(cell["seconds"] for cell in json.loads(said.stdout)["cells"])
        for number in range(cells):
            file = folder / f"Dockerfile.{number}"
            file.write_text(SMALL.replace("{{ number }}", str(number)).replace("{{ salt }}", "theirs"))
            words = ("buildx", "build", "--provenance=false", "--tag", f"bench-bare:{number}", "--file")
            bare = (*words, str(file), str(folder / "context"))
            theirs.append(run(partial(engine.docker, *bare)))
    taken = (ours, median(theirs))
    what = "a small cell built, audited and stored"
    yield overhead(what, taken, "`docker buildx build --tag`", CELL_BAR, pace)


def again(folder: Path, pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield the time of a build that has nothing to do."""
    variants, rounds = extent.part(VARIANTS), extent.times(ROUNDS)
    ours = ("build", "--push", "--jobs", "4")
    with new_engine() as engine, contextlib.ExitStack() as stack:
        registry = Registry(engine, PORT)
        stack.callback(registry.remove)
        image = f"{registry.address}/bench/small"
        _matrix(folder, image, variants)
        run(lambda: engine.imagematrix(*ours, cwd=folder))
        pushed = _median(lambda: engine.imagematrix(*ours, cwd=folder), rounds)
        run(lambda: engine.imagematrix("publish", f"{image}:v1", cwd=folder))
        published = _median(lambda: engine.imagematrix(*ours, cwd=folder), rounds)
        bake = _bake(engine, folder, "--push")
        run(bake)
        theirs = _median(bake, extent.times(3))
    for what, taken in (("pushed", pushed), ("published", published)):
        yield Row(
            what=f"`build --push` of {variants} variants that are {what} already",
            ours=duration(taken),
            ratio=f"{theirs / taken:.1f} x faster",
            instead=f"`docker buildx bake --push`: {duration(theirs)}",
            bar=pace.told(AGAIN_BAR),
            met=taken <= pace.limit(AGAIN_BAR),
        )


def small(folder: Path, _pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield the time of the first build of a dozen small cells."""
    cells = extent.part(CELLS)
    _matrix(folder, "bench-small", cells)
    yield _beside_bake(f"{cells} small cells from an empty cache", folder, extent.pairs, SMALL_BAR)


def shipped(folder: Path, _pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield the time of the first build of the shipped matrix."""
    shutil.copytree(samples.ROOT / "templates", folder / "templates")
    shutil.copy(samples.ROOT / "matrix.yaml", folder)
    only = ("--only", ONE) if extent.smallest else ()
    yield _beside_bake("the shipped matrix from an empty cache", folder, extent.pairs, SHIPPED_BAR, only)


def _beside_bake(what: str, folder: Path, count: int, bar: float, only: Sequence[str] = ()) -> Row:
    """Compare our build with bake's build of the same Dockerfiles, each on a new engine."""

    def ours() -> float:
        with new_engine() as engine:
            (folder / LOCK).unlink(missing_ok=True)  # it locks the bases of another engine
            # The cache of layers is empty, too, as in a build on a new machine.
            environment = engine.environment | {"XDG_CACHE_HOME": f"{engine.folder}/cache"}
            return run(lambda: engine.imagematrix("build", *only, cwd=folder, env=environment))

    def theirs() -> float:
        with new_engine() as engine:
            (folder / LOCK).unlink(missing_ok=True)
            bake = _bake(engine, folder, "--load", only)
            engine.docker("buildx", "prune", "--all", "--force")  # the compiler's answers to the export
            return run(bake)

    taken, instead = pairs(ours, theirs, count)
    return Row(
        what=what,
        ours=duration(taken),
        ratio=f"{taken / instead:.2f} x bake",
        instead=f"`docker buildx bake --load`: {duration(instead)}",
        bar=f"{bar} x bake",
        met=taken <= bar * instead,
    )


def _matrix(folder: Path, image: str, count: int, salt: str = "") -> None:
    """Write a matrix of `count` small cells."""
    for name in ("templates", "context"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "templates" / "small.j2").write_text(SMALL.replace("{{ salt }}", salt))
    document = {
        "schema": "imagematrix.matrix/v1",
        "images": {image: {"version": "v1", "template": "small.j2", "context": "context"}},
        "axes": {"number": [str(number) for number in range(count)]},
    }
    (folder / "matrix.yaml").write_text(json.dumps(document))  # JSON is YAML


def _bake(
    engine: Engine, folder: Path, option: str, only: Sequence[str] = ()
) -> Callable[[], subprocess.CompletedProcess[str]]:
    """Return the command that bakes the matrix in a folder, from the Dockerfiles that imagematrix renders."""
    said = engine.imagematrix("export", "bake", *only, cwd=folder)
    if said.returncode:
        raise SystemExit(said.stderr)
    (folder / "bake.json").write_text(said.stdout)
    command = ("docker", "buildx", "bake", "--file", "bake.json", option)

    def bake() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, check=False, cwd=folder, env=engine.environment, capture_output=True, text=True
        )

    return bake


def run(what: Callable[[], subprocess.CompletedProcess[str]]) -> float:
    """Return the seconds that a command takes; raise SystemExit with its output if it fails."""
    start = time.perf_counter()
    done = what()
    taken = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{done.args} exited with {done.returncode}: {done.stderr[-2000:]}")
    return taken


def _median(what: Callable[[], subprocess.CompletedProcess[str]], rounds: int) -> float:
    return median(run(what) for _ in range(rounds))
