"""Measure selection, including the start of a process and within a process."""

from __future__ import annotations

import contextlib
import gc
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import samples
from measure import PASS, Row, calls, duration, processes

from imagematrix.images.catalog.catalog import Catalog
from imagematrix.images.catalog.sources import open_catalog
from imagematrix.selection.gang.gang import NothingFitsAll
from imagematrix.selection.gang.gang_selection import select_gang
from imagematrix.selection.selector import Selector, select_many

if TYPE_CHECKING:
    from collections.abc import Iterator

    from measure import Extent, Pace

    from imagematrix.hardware.host.host import Host

PROCESSES = 5  # of the command for a gang
LIBRARY_BAR, COMMAND_BAR = 5, 6  # times `python -c pass`
NEW_BAR, KNOWN_BAR, FLEET_BAR, GANG_BAR = 1e-3, 10e-6, 2.0, 1.0  # seconds (see measure.REFERENCE)
FLEET, GANG, KINDS = 100_000, 10_000, 200

LIBRARY = """
import sys
import imagematrix as im
im.select(im.probe(nvml=False), im.open_catalog(sys.argv[1]), gpus="none")
"""
# Nodes with the same driver, and GPUs of the same compute capability: one variant fits all of them.
ALIKE = ("genoa-h200", "sapphirerapids-h100")
PARSE = "import json, sys; json.loads(open(sys.argv[1], 'rb').read())"


def started(folder: Path, _pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield the time of a fresh interpreter, and of the command."""
    size = extent.part(samples.SIZE)
    catalog = samples.catalog(folder, size)
    command = Path(sys.executable).with_name("imagematrix")
    options = ("--catalog", catalog, "--host", samples.saved()["genoa-h200"])
    ours = {
        "pass": PASS,
        "parse": (sys.executable, "-c", PARSE, catalog),
        "library": (sys.executable, "-c", LIBRARY, catalog),
        "command": (command, "select", "training:v1", *options),
    }
    rivals = () if extent.smallest else ("docker", "typer")
    theirs = {name: (sys.executable, "-c", f"import {name}") for name in rivals}
    taken = processes({**ours, **theirs}, extent.rounds)
    seconds = {name: cost.seconds for name, cost in taken.items()}

    def row(what: str, name: str, instead: str = "", bar: int | None = None) -> Row:
        times = seconds[name] / seconds["pass"]
        return Row(
            what=what,
            ours=duration(seconds[name]),
            ratio=f"{times:.1f} x pass",
            instead=instead,
            bar=f"{duration(bar * seconds['pass'])} ({bar} x pass)" if bar else "",
            met=times <= bar if bar else None,
        )

    def alone(name: str) -> str:
        return f"`import {name}` alone: {duration(seconds[name])}" if name in seconds else ""

    yield row("`python -c pass`", "pass")
    yield row(f"json alone: load it, and the catalog of {size:,} variants", "parse")
    yield row(f"import, probe, load {size:,} variants, select", "library", alone("docker"), LIBRARY_BAR)
    yield row("`imagematrix select --catalog FILE --host FILE`", "command", alone("typer"), COMMAND_BAR)


def ganged(folder: Path, pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield the time of the command for a gang, with the reading of its hosts."""
    catalog = samples.catalog(folder, extent.part(samples.SIZE))
    size, kinds = extent.part(GANG), extent.part(KINDS)
    command = Path(sys.executable).with_name("imagematrix")
    for what, nodes in (
        (f"of {kinds} kinds", samples.fleet(size, kinds, ALIKE)),
        ("that all differ", samples.differing(size, ALIKE)),
    ):
        path = samples.hosts(folder, nodes)
        options = ("--catalog", catalog, "--gang", path, "--alike", "cuda")
        rounds = extent.times(PROCESSES)
        seconds = processes({"": (command, "select", "training:v1", *options)}, rounds)[""].seconds
        yield Row(
            what=f"`imagematrix select --gang` of {size:,} nodes {what}",
            ours=duration(seconds),
            ratio=f"{seconds / pace.seconds:.0f} x pass",
            bar=pace.told(GANG_BAR),
            met=seconds <= pace.limit(GANG_BAR),
        )


def decided(folder: Path, pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield the time of a decision in a process that has loaded the catalog."""
    catalog = open_catalog(samples.catalog(folder, extent.part(samples.SIZE)))
    size, gang, kinds = map(extent.part, (FLEET, GANG, KINDS))
    rounds = extent.rounds
    selector = Selector(catalog)
    new = iter(samples.models(rounds * 10))
    model = samples.models(1)[0]
    selector.explain(model)
    nodes = samples.fleet(size, kinds)
    gc.collect()

    def many() -> None:
        # A new catalog, for which nothing is cached yet.
        select_many(nodes, Catalog(image="training", version="v1", variants=catalog.variants))

    gangs = {f"of {kinds} kinds": nodes[:gang], "that all differ": samples.differing(gang)}

    def together(some: list[Host], alike: str | None) -> None:
        # No variant fits all: the largest gang is found.
        with contextlib.suppress(NothingFitsAll):
            select_gang(some, replace(catalog), alike=alike)

    yield _timed("the first node of a catalog", calls(lambda: Selector(catalog).explain(model), rounds))
    yield _timed("a new kind of node", calls(lambda: selector.explain(next(new)), rounds * 10), NEW_BAR, pace)
    yield _timed(
        "a known kind of node", calls(lambda: selector.explain(model), rounds * 100), KNOWN_BAR, pace
    )
    often = extent.times(3)
    yield _timed(f"{size:,} nodes of {kinds} kinds", calls(many, often), FLEET_BAR, pace)
    for which, some in gangs.items():
        for what, alike in (("one variant", None), ("alike variants", "cuda")):
            seconds = calls(partial(together, some, alike), often)
            yield _timed(f"{what} for {gang:,} nodes {which}", seconds, GANG_BAR, pace)


def _timed(what: str, seconds: float, bar: float | None = None, pace: Pace | None = None) -> Row:
    row = Row(what=f"select, {what}", ours=duration(seconds))
    if bar is None or pace is None:
        return row
    return replace(row, bar=pace.told(bar), met=seconds <= pace.limit(bar))
