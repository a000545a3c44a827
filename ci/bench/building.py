"""How long builds take beside `docker buildx` on the same Dockerfiles; it starts an engine and a registry."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from statistics import median
from typing import TYPE_CHECKING

import samples
from measure import Row, duration

sys.path.insert(0, str(samples.ROOT / "tests" / "doubles"))
sys.path.insert(0, str(samples.ROOT / "tests" / "engine"))
from conftest import NEEDED, Engine, Registry  # the engines of the tests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PORT = 5099
VARIANTS = 100
AGAIN_BAR, CELL_BAR, WHOLE_BAR = 0.5, 0.060, 1.05  # seconds, seconds, times bake
CELLS = 12
ROUNDS = 7
SMALL = "FROM debian:trixie\nRUN echo {{ number }} {{ salt }} > /number\n"


def possible() -> bool:
    """Whether this is root, and what it takes is installed."""
    return os.getuid() == 0 and all(map(shutil.which, NEEDED))


def rows(folder: Path) -> Iterator[Row]:
    """Yield what a build costs that does nothing, one of a cell, and one of all cells from an empty cache."""
    # Each on an engine of its own: for seconds after `docker buildx bake` one is busy with what was built.
    with _engine() as engine:
        yield _cell(engine, folder / "cell")
    with _engine() as engine, contextlib.ExitStack() as stack:
        registry = Registry(engine, PORT)
        stack.callback(registry.remove)
        yield from _again(engine, folder / "again", f"{registry.address}/bench/small")
    yield _whole(folder / "whole")


@contextlib.contextmanager
def _engine() -> Iterator[Engine]:
    engine = Engine("containerd")
    try:
        engine.start()
        engine.seed()
        yield engine
    finally:
        engine.remove()


def _again(engine: Engine, folder: Path, image: str) -> Iterator[Row]:
    _matrix(folder, image, VARIANTS)
    ours = ("build", "--push", "--jobs", "4")
    _run(lambda: engine.imagematrix(*ours, cwd=folder))
    pushed = _median(lambda: engine.imagematrix(*ours, cwd=folder), ROUNDS)
    _run(lambda: engine.imagematrix("publish", f"{image}:v1", cwd=folder))
    published = _median(lambda: engine.imagematrix(*ours, cwd=folder), ROUNDS)
    bake = _bake(engine, folder, "--push")
    _run(bake)
    theirs = _median(bake, 3)
    for what, taken in (("pushed", pushed), ("published", published)):
        yield Row(
            what=f"`build --push` of {VARIANTS} variants that are {what} already",
            ours=duration(taken),
            ratio=f"{theirs / taken:.1f} x faster",
            instead=f"`docker buildx bake --push`: {duration(theirs)}",
            bar=duration(AGAIN_BAR),
            met=taken <= AGAIN_BAR,
        )


def _cell(engine: Engine, folder: Path) -> Row:
    _matrix(folder, "bench-cell", CELLS, salt="ours")
    said = engine.imagematrix("build", "--jobs", "1", "--json", cwd=folder)
    ours = median(cell["seconds"] for cell in json.loads(said.stdout)["cells"])
    theirs = []
    for number in range(CELLS):
        file = folder / f"Dockerfile.{number}"
        file.write_text(SMALL.replace("{{ number }}", str(number)).replace("{{ salt }}", "theirs"))
        words = (
            "buildx",
            "build",
            "--provenance=false",
            "--tag",
            f"bench-bare:{number}",
            "--file",
            str(file),
        )
        theirs.append(_run(lambda words=words: engine.docker(*words, str(folder / "context"))))
    added = ours - median(theirs)
    return Row(
        what="a small cell built, audited and stored",
        ours=duration(ours),
        ratio=f"{added * 1e3:+.0f} ms",
        instead=f"`docker buildx build --tag`: {duration(median(theirs))}",
        bar=f"+{duration(CELL_BAR)}",
        met=added <= CELL_BAR,
    )


def _whole(folder: Path) -> Row:
    with _engine() as engine:
        _shipped(folder / "ours")
        plan = json.loads(engine.imagematrix("plan", "--json", cwd=folder / "ours").stdout)
        count = sum(cell["status"] == "build" for cell in plan["cells"])
        ours = _run(lambda: engine.imagematrix("build", cwd=folder / "ours"))
    with _engine() as engine:
        _shipped(folder / "theirs")
        bake = _bake(engine, folder / "theirs", "--load")
        engine.docker("buildx", "prune", "--all", "--force")  # what the export has asked of the compiler
        theirs = _run(bake)
    return Row(
        what=f"the shipped matrix from an empty cache ({count} cells)",
        ours=duration(ours),
        ratio=f"{ours / theirs:.2f} x bake",
        instead=f"`docker buildx bake --load`: {duration(theirs)}",
        bar=f"{WHOLE_BAR} x bake",
        met=ours <= WHOLE_BAR * theirs,
    )


def _shipped(folder: Path) -> None:
    """Copy the shipped matrix to a new folder, for an engine to have its bases locked beside it."""
    shutil.copytree(samples.ROOT / "templates", folder / "templates")
    shutil.copy(samples.ROOT / "matrix.yaml", folder)


def _matrix(folder: Path, image: str, count: int, salt: str = "") -> None:
    """Write a matrix of `count` small cells to a new folder."""
    (folder / "templates").mkdir(parents=True)
    (folder / "context").mkdir()
    (folder / "templates" / "small.j2").write_text(SMALL.replace("{{ salt }}", salt))
    document = {
        "schema": "imagematrix.matrix/v1",
        "images": {image: {"version": "v1", "template": "small.j2", "context": "context"}},
        "axes": {"number": [str(number) for number in range(count)]},
    }
    (folder / "matrix.yaml").write_text(json.dumps(document))  # JSON is YAML


def _bake(engine: Engine, folder: Path, option: str) -> Callable[[], subprocess.CompletedProcess[str]]:
    """Return what bakes the matrix in a folder, from the Dockerfiles that we render."""
    said = engine.imagematrix("export", "bake", cwd=folder)
    if said.returncode:
        raise SystemExit(said.stderr)
    (folder / "bake.json").write_text(said.stdout)
    command = ("docker", "buildx", "bake", "--file", "bake.json", option)
    quiet = {"capture_output": True, "text": True}
    return lambda: subprocess.run(command, check=False, cwd=folder, env=engine.environment, **quiet)


def _run(what: Callable[[], subprocess.CompletedProcess[str]]) -> float:
    start = time.perf_counter()
    done = what()
    taken = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{done.args} ended with {done.returncode}: {done.stderr[-2000:]}")
    return taken


def _median(what: Callable[[], subprocess.CompletedProcess[str]], rounds: int) -> float:
    return median(_run(what) for _ in range(rounds))
