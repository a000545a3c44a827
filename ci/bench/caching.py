"""Measure the first result of a program that compiles when it runs, from a warm image and its variant."""

from __future__ import annotations

import json
import shutil
import time
from functools import partial
from typing import TYPE_CHECKING

import building
import cpu_frameworks  # a double of the tests, on the path with those that `building` imports
import pulling
from conftest import Registry
from measure import Row, duration, pairs
from samples import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from conftest import Engine
    from measure import Extent, Pace

BAR = 0.5  # times the variant's
NAME = "torch"
SMALLEST = "numba"  # a hundredth of what is downloaded
PORT = 5097
# numpy's wheel needs x86-64-v2.
V2_FLAGS = ("pni", "ssse3", "sse4_1", "sse4_2", "popcnt", "cx16", "lahf_lm")
PACKAGES = "packages"
# Some files of the packages are for other Pythons.
TEMPLATE = f"""\
FROM debian:trixie
{{% import "macros.j2" as debian %}}
RUN apt-get update -q && apt-get install -qy --no-install-recommends g++ python3 libpython3-dev && \\
    {{{{ debian.clean_apt() }}}}
COPY {PACKAGES} {cpu_frameworks.PLACE}
RUN python3 -m compileall -q {cpu_frameworks.PLACE} || true
{{{{ debian.warm_caches() }}}}
"""


def rows(folder: Path, _: Pace, extent: Extent) -> Iterator[Row]:
    """Yield the seconds to the first result, in images that are there and with the pull before it."""
    name = SMALLEST if extent.smallest else NAME
    with building.new_engine() as engine:
        registry = Registry(engine, PORT)
        version = f"{registry.address}/bench/{name}:v1"
        _publish(engine, _make_project(folder, name, version), version)
        pulling.emptied(engine)
        for options in (("--no-warm",), ()):
            building.run(partial(engine.imagematrix, "pull", "--gpus", "none", *options, version))
        variant, warm = ([*options, version, *cpu_frameworks.COMMAND] for options in (("--no-warm",), ()))
        what = f"first result after process start from a warm image, {name}"
        yield _compare(what, partial(_time_program, engine), warm, variant, extent, BAR)
        yield _compare(
            "`imagematrix run` to its end, with the pull", partial(_time_cold, engine), warm, variant, extent
        )
        registry.remove()


def _compare(
    what: str,
    measure: partial[float],
    warm: Sequence[str],
    variant: Sequence[str],
    extent: Extent,
    bar: float | None = None,
) -> Row:
    ours, theirs = pairs(partial(measure, warm), partial(measure, variant), extent.pulls)
    return Row(
        what=what,
        ours=duration(ours),
        ratio=f"{ours / theirs:.2f} x",
        instead=f"the variant: {duration(theirs)}",
        bar=f"{bar} x" if bar else "",
        met=ours <= bar * theirs if bar else None,
    )


def _make_project(folder: Path, name: str, version: str) -> Path:
    """Write a matrix of one image with a framework and its program; return its folder."""
    project = folder / "project"
    for part in ("context", "templates"):
        (project / part).mkdir(parents=True)
    cpu_frameworks.install(name, project / "context" / PACKAGES)
    shutil.copy(ROOT / "templates/macros.j2", project / "templates")
    (project / "templates/image.j2").write_text(TEMPLATE)
    image = {
        "version": "v1",
        "template": "image.j2",
        "context": "context",
        "warm_up": {"command": cpu_frameworks.COMMAND, "environment": cpu_frameworks.ENVIRONMENT},
    }
    matrix = {
        "schema": "imagematrix.matrix/v1",
        "images": {version.removesuffix(":v1"): image},
        "axes": {"march": ["v2"]},
        "facts": {"march": {"v2": {"flags": list(V2_FLAGS)}}},
    }
    (project / "matrix.yaml").write_text(json.dumps(matrix))
    return project


def _publish(engine: Engine, project: Path, version: str) -> None:
    """Build a version, publish it, and publish a warm image for this machine."""
    pulling.published(engine, project, version)
    staging = version.replace("/bench/", "/staging/").removesuffix(":v1")
    warmed = engine.imagematrix("warm", version, "--staging", staging)
    if warmed.returncode:
        raise SystemExit(warmed.stderr)
    publish = ("publish", "--warm", warmed.stdout.strip(), "--yes", version)
    building.run(partial(engine.imagematrix, *publish))


def _time_program(engine: Engine, words: Sequence[str]) -> float:
    """Return the seconds that the program prints, from its own start."""
    environment = [word for pair in cpu_frameworks.ENVIRONMENT.items() for word in ("-e", "=".join(pair))]
    done = engine.imagematrix("run", "--rm", "--gpus", "none", *environment, *words)
    if done.returncode:
        raise SystemExit(done.stderr)
    return cpu_frameworks.read_seconds(done.stdout)


def _time_cold(engine: Engine, words: Sequence[str]) -> float:
    """Return the seconds of a start on an engine without images."""
    pulling.emptied(engine)
    started = time.perf_counter()
    _time_program(engine, words)
    return time.perf_counter() - started
