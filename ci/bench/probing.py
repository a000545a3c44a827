"""Measure how long a fresh process takes to read this machine's CPU flags."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from measure import Row, duration, processes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from measure import Extent, Pace

WHAT = "the CPU's flags, fresh process"
SLOW_ROUNDS = 3  # for commands that take more than a second


def rows(_folder: Path, _pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield the probe, compared with two libraries."""
    code = "import imagematrix; imagematrix.probe(nvml=False).cpu.flags"
    if extent.smallest:
        cost = processes({"ours": (sys.executable, "-c", code)}, extent.rounds)["ours"]
        yield Row(what=WHAT, ours=duration(cost.seconds))
        return
    codes = {"ours": code, "archspec": "import archspec.cpu; archspec.cpu.host().features"}
    slow = {"cpuinfo": "import cpuinfo; cpuinfo.get_cpu_info()['flags']"}
    taken = processes({name: (sys.executable, "-c", code) for name, code in codes.items()}, extent.rounds)
    taken |= processes({name: (sys.executable, "-c", code) for name, code in slow.items()}, SLOW_ROUNDS)
    ours = taken["ours"].seconds
    for name, label in (("archspec", "archspec.cpu.host()"), ("cpuinfo", "py-cpuinfo's get_cpu_info()")):
        theirs = taken[name].seconds
        yield Row(
            what=WHAT,
            ours=duration(ours),
            ratio=f"{theirs / ours:.1f} x faster",
            instead=f"{label}: {duration(theirs)}",
            bar="faster",
            met=ours < theirs,
        )
