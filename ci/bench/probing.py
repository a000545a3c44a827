"""Measure how long a fresh process takes to read this machine's CPU flags."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from measure import Row, duration, processes

if TYPE_CHECKING:
    from collections.abc import Iterator

SLOW_ROUNDS = 3  # for commands that take more than a second


def rows(rounds: int) -> Iterator[Row]:
    """Yield the probe, compared with two libraries."""
    codes = {
        "ours": "import imagematrix; imagematrix.probe(nvml=False).cpu.flags",
        "archspec": "import archspec.cpu; archspec.cpu.host().features",
    }
    slow = {"cpuinfo": "import cpuinfo; cpuinfo.get_cpu_info()['flags']"}
    taken = processes({name: (sys.executable, "-c", code) for name, code in codes.items()}, rounds)
    taken |= processes({name: (sys.executable, "-c", code) for name, code in slow.items()}, SLOW_ROUNDS)
    ours = taken["ours"].seconds
    for name, label in (("archspec", "archspec.cpu.host()"), ("cpuinfo", "py-cpuinfo's get_cpu_info()")):
        theirs = taken[name].seconds
        yield Row(
            what="the CPU's flags, fresh process",
            ours=duration(ours),
            ratio=f"{theirs / ours:.1f} x faster",
            instead=f"{label}: {duration(theirs)}",
            bar="faster",
            met=ours < theirs,
        )
