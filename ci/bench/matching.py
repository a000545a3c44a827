"""Measure what matching gains: real programs for each march of this CPU, and the cold start of a lean image.

Every rate is divided by the rate of x86-64-v2 in the same round, on the same processor.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import compiling
import pulling
import yaml
from compiling import BASELINE, CHOOSES, CrashedError
from measure import Row, duration
from pulling import FAT, MATCHED
from samples import ROOT

from imagematrix import Catalog, probe, select
from imagematrix.hardware.vendors import marches
from imagematrix.images.catalog.catalog import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from measure import Extent, Pace
    from pulling import Pulled

    from imagematrix import Host

ROUNDS = 7
PULLS = 5
SMALLEST = "bitsandbytes==0.50.2"  # a wheel with device code, of 60 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The rates of a program: for each variant one rate per round, or the signal that ended it."""

    name: str
    unit: str
    rates: Mapping[str, Sequence[float]]
    crashes: Mapping[str, str]

    def gain(self, variant: str, beside: str = BASELINE) -> str:
        """Return how many times as fast a variant is: the median of the rounds (minimum to maximum)."""
        pairs = zip(self.rates[variant], self.rates[beside], strict=True)
        ratios = sorted(own / other for own, other in pairs)
        return f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def rows(folder: Path, _pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield what matching gains."""
    possible, matched = _marches(probe(nvml=False))
    yield Row(
        what="marches of the matrix that this CPU has",
        ours=f"{matched} fits best",
        instead=" ".join(possible),
    )
    programs = compiling.programs(folder, possible)
    built = [compiling.shipped(folder, possible)] if extent.smallest else list(programs)
    for one in _measured(built, extent.times(ROUNDS)):
        yield from _rows(one, matched)
    wheel = SMALLEST if extent.smallest else pulling.WHEEL
    yield _pulled(pulling.pulled(folder, extent.times(PULLS), wheel))


def _marches(host: Host) -> tuple[list[str], str]:
    """Return the marches of the shipped matrix that the host supports, in order, and the selected march."""
    version = subprocess.run(["gcc", "-dumpversion"], check=True, capture_output=True, text=True).stdout
    compiler = f"gcc-{version.strip()}"
    names = yaml.safe_load((ROOT / "matrix.yaml").read_text())["axes"]["march"]
    needs = {
        march: flags for march in names if (flags := marches.get_required_flags(march, compiler)) is not None
    }
    possible = sorted(
        (march for march in needs if needs[march] <= host.cpu.flags), key=lambda one: len(needs[one])
    )
    variants = tuple(
        Variant(
            reference=march,
            digest=None,
            platform="linux/amd64",
            march=march,
            cpu_flags=needs[march],
            vendor=marches.get_vendor(march),
        )
        for march in possible
    )
    chosen = select(host, Catalog(image="bench", version="v1", variants=variants), gpus="none")
    return possible, str(chosen.selected)


def _measured(programs: Sequence[compiling.Program], rounds: int) -> Iterator[Measured]:
    """Yield the rates of the programs; variants take turns, each round in another order."""
    processor = max(os.sched_getaffinity(0))
    for program in programs:
        names = list(program.variants)
        rates: dict[str, list[float]] = {name: [] for name in names}
        crashes: dict[str, str] = {}
        for number in range(rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                if name in crashes:
                    continue
                try:
                    rates[name].append(program.rate(name, processor))
                except CrashedError as error:
                    crashes[name] = str(error)
                    del rates[name]
        yield Measured(name=program.name, unit=program.unit, rates=rates, crashes=crashes)


def _rows(measured: Measured, matched: str) -> Iterator[Row]:
    for variant, rates in measured.rates.items():
        if variant == BASELINE:
            continue
        beside = ""
        if variant == matched and CHOOSES in measured.rates:
            beside = f"; {CHOOSES}: {measured.gain(matched, CHOOSES)}"
        yield Row(
            what=f"{measured.name}: {variant}",
            ours=f"{median(rates):.4g} {measured.unit}",
            ratio=measured.gain(variant),
            instead=f"{BASELINE}: {median(measured.rates[BASELINE]):.4g}{beside}",
        )
    for variant, name in measured.crashes.items():
        yield Row(what=f"{measured.name}: {variant}", ours=f"ended by {name}")


def _pulled(pulled: Mapping[str, Pulled]) -> Row:
    seconds = {name: median(one.seconds) for name, one in pulled.items()}
    size = {name: f"{one.size / 1e6:.0f} MB" for name, one in pulled.items()}
    return Row(
        what="`run` to the first line, nothing pulled yet",
        ours=f"{duration(seconds[MATCHED])}, {size[MATCHED]}",
        ratio=f"{seconds[MATCHED] / seconds[FAT]:.2f} x the time",
        instead=f"code for all GPUs: {duration(seconds[FAT])}, {size[FAT]}",
    )
