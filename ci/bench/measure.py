"""Measuring time as medians of fresh processes or of repeated calls, and the rows of the table."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

PASS = (sys.executable, "-c", "pass")
REFERENCE = 8.6e-3  # seconds of PASS on the machine for which limits are stated
KIB = 1024
UNITS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; `met` is None if there is no limit."""

    what: str
    ours: str
    ratio: str = ""
    instead: str = ""
    bar: str = ""
    met: bool | None = None


MET = {True: "yes", False: "NO", None: ""}


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row: what, ours, the ratio, what is instead, the limit, and whether it is met."""
    return row.what, row.ours, row.ratio, row.instead, row.bar, MET[row.met]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is measured: fresh processes for a row, builds that alternate with another tool's, and pulls.

    The `smallest` is enough to see that a group of rows still runs: no number in it means anything. Without
    `engines`, no command that takes minutes is measured beside ours. With `large`, more is downloaded.
    """

    rounds: int
    pairs: int
    pulls: int
    engines: bool = True
    large: bool = False
    smallest: bool = False

    def part(self, number: int) -> int:
        """Return how many of something there are: a hundredth, and at least one, in the smallest extent."""
        return max(number // 100, 1) if self.smallest else number

    def times(self, rounds: int) -> int:
        """Return how often something is done: once in the smallest extent."""
        return 1 if self.smallest else rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The speed of this machine: the seconds that `python -c pass` takes."""

    seconds: float

    @classmethod
    def measure(cls, rounds: int) -> Pace:
        """Measure the pace of this machine."""
        return cls(seconds=processes({"pass": PASS}, rounds)["pass"].seconds)

    def limit(self, bar: float) -> float:
        """Convert a limit in stated seconds to this machine."""
        return bar * self.seconds / REFERENCE

    def told(self, bar: float) -> str:
        """Format a limit in stated seconds: its time on this machine, and its multiple of PASS."""
        return f"{duration(self.limit(bar))} ({bar / REFERENCE:.3g} x pass)"


def overhead(what: str, taken: tuple[float, float], instead: str, bar: float, pace: Pace) -> Row:
    """Return the row of our time and that of `instead`; ours may take `bar` stated seconds more."""
    ours, theirs = taken
    return Row(
        what=what,
        ours=duration(ours),
        ratio=f"{(ours - theirs) * 1e3:+.0f} ms",
        instead=f"{instead}: {duration(theirs)}",
        bar=f"+{pace.told(bar)}",
        met=ours - theirs <= pace.limit(bar),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a process: seconds, and its peak memory in MiB."""

    seconds: float
    memory: float


def processes(commands: Mapping[str, Sequence[str | Path]], rounds: int, *, warm: int = 1) -> dict[str, Cost]:
    """Return the medians for each command. They run in turn, `rounds` times after `warm` uncounted rounds.

    A Python that does nothing is started before each, so that conditions are the same for all.
    """
    taken: dict[str, list[Cost]] = {name: [] for name in commands}
    for _ in range(warm + rounds):
        for name, command in commands.items():
            _run(PASS)
            taken[name].append(_run(command))
    return {name: _median(costs[warm:]) for name, costs in taken.items()}


def calls(function: Callable[[], object], rounds: int) -> float:
    """Return the median time of a call, in seconds."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return median(taken)


def pairs(ours: Callable[[], float], theirs: Callable[[], float], count: int) -> tuple[float, float]:
    """Return the medians of two measurements that alternate, in alternating order."""
    taken: tuple[list[float], list[float]] = [], []
    for number in range(count):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            taken[which].append((ours, theirs)[which]())
    return median(taken[0]), median(taken[1])


def duration(seconds: float) -> str:
    """Format a time with a suitable unit."""
    unit, factor = next((pair for pair in UNITS if seconds * pair[1] >= 1), UNITS[-1])
    return f"{seconds * factor:.3g} {unit}"


def megabytes(size: int) -> str:
    """Format a number of bytes."""
    return f"{size / 1e6:,.0f} MB"


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost(seconds=median(cost.seconds for cost in costs), memory=median(cost.memory for cost in costs))


def _run(command: Sequence[str | Path]) -> Cost:
    environment = {**os.environ, "DOCKER_HOST": "unix:///nowhere/docker.sock"}  # no engine is used
    with tempfile.TemporaryFile("w+") as said:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        taken = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            words = " ".join(map(str, command))
            raise SystemExit(f"{words} exited with {process.returncode}: {said.read()[-2000:]}")
    return Cost(seconds=taken, memory=usage.ru_maxrss / KIB)
