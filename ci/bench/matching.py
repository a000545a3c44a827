"""Measure what matching gains: real programs for each march of this CPU, and the cold start of a lean image.

Every rate is divided by the rate of x86-64-v2 in the same round, on the same processor.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
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
from imagematrix.catalog.catalog import Variant
from imagematrix.facts import marches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pulling import Pulled

    from imagematrix import Host

ROUNDS = 7
PULLS = 5
BEGIN, END = "<!-- what matching gains: begin -->", "<!-- what matching gains: end -->"
HOW = "docs/benchmark-results.md"


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


def rows(folder: Path, *, write: bool) -> Iterator[Row]:
    """Yield what matching gains; with `write` the tables go into docs/benchmark-results.md, too."""
    host = probe(nvml=False)
    possible, matched = _marches(host)
    yield Row(
        what="marches of the matrix that this CPU has",
        ours=f"{matched} fits best",
        instead=" ".join(possible),
    )
    measured = []
    for one in _measured(list(compiling.programs(folder, possible))):
        measured.append(one)
        yield from _rows(one, matched)
    pulled = pulling.pulled(folder, PULLS)
    yield _pulled(pulled)
    if write:
        _write(_tables(host, measured, pulled, possible, matched))


def _marches(host: Host) -> tuple[list[str], str]:
    """Return the marches of the shipped matrix that the host supports, in order, and the selected march."""
    version = subprocess.run(["gcc", "-dumpversion"], check=True, capture_output=True, text=True).stdout
    compiler = f"gcc-{version.strip()}"
    names = yaml.safe_load((ROOT / "matrix.yaml").read_text())["axes"]["march"]
    needs = {march: flags for march in names if (flags := marches.required(march, compiler)) is not None}
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
            vendor=marches.vendor(march),
        )
        for march in possible
    )
    chosen = select(host, Catalog(image="bench", version="v1", variants=variants), gpus="none")
    return possible, str(chosen.selected)


def _measured(programs: Sequence[compiling.Program]) -> Iterator[Measured]:
    """Yield the rates of the programs; variants take turns, each round in another order."""
    processor = max(os.sched_getaffinity(0))
    for program in programs:
        names = list(program.variants)
        rates: dict[str, list[float]] = {name: [] for name in names}
        crashes: dict[str, str] = {}
        for number in range(ROUNDS):
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


def _tables(
    host: Host,
    measured: Sequence[Measured],
    pulled: Mapping[str, Pulled],
    possible: Sequence[str],
    matched: str,
) -> str:
    others = [march for march in possible if march != BASELINE]
    shown = [f"**{march}**" if march == matched else march for march in others]
    rates = [
        (
            one.name,
            f"{median(one.rates[BASELINE]):.4g} {one.unit}",
            *(
                one.gain(march) if march in one.rates else one.crashes.get(march, "")
                for march in (*others, CHOOSES)
            ),
        )
        for one in measured
    ]
    starts = [
        (
            what,
            f"{one.size / 1e6:.0f} MB",
            f"{median(one.seconds):.1f} s ({min(one.seconds):.1f} to {max(one.seconds):.1f})",
        )
        for what, one in (("for compute capability 9.0", pulled[MATCHED]), ("for all GPUs", pulled[FAT]))
    ]
    today = datetime.now(UTC).date().isoformat()
    first = (
        f"On one processor of {host.cpu.model}, {today}, {ROUNDS} rounds. Rates are relative to the "
        f"same program built for {BASELINE} in the same round: the median (minimum to maximum). "
        f"`select` chooses {matched} on this machine."
    )
    second = (
        f"The shipped program in an image with the files of `{pulling.WHEEL}`, from a registry on loopback, "
        f"{PULLS} rounds:"
    )
    started = ("image", "to pull", "`imagematrix run` to the first line, cold")
    programs = _table(("program", BASELINE, *shown, CHOOSES), rates)
    lines = [first, "", *programs, "", second, "", *_table(started, starts)]
    return "\n".join(lines)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    for line in (head, ["---"] * len(head), *lines):
        yield f"| {' | '.join(line)} |"


def _write(tables: str) -> None:
    """Write the tables between the marks in their page."""
    path = ROOT / HOW
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{HOW} has no place for the tables")
    path.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}")
