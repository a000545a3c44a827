"""Shards: a matrix in parts of about equal duration, the same parts on every machine that computes them.

A shard is a part of all feasible cells, not only of missing ones, which change while other shards run. All
images of a cell are in the same shard, because one may build on another.
"""

from __future__ import annotations

import heapq
import re
import statistics
from dataclasses import dataclass, replace

from imagematrix.build.plan.plan import Dropped, Planned, PlanStatus
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.build.plan.plan import Plan

UNKNOWN = 1.0  # seconds of every cell if no duration is known

Durations = dict[tuple[str, str], float]  # seconds by image and cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Part `number` of `count`; the first is number 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Return the shard in `text`, such as "2/8"; raise UsageError if it is invalid."""
        match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text, re.ASCII)
        shard = cls(number=int(match[1]), count=int(match[2])) if match else None
        if shard is None or not 1 <= shard.number <= shard.count:
            remedy = "write I/N: 1/8 is the first of eight, 8/8 the last"
            raise UsageError(f"invalid shard: {text!r}", remedy=remedy)
        return shard

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def select_shard(plan: Plan, shard: Shard, durations: Durations) -> Plan:
    """Return `plan` for one shard: cells that belong to another shard have the status "other-shard"."""
    unknown = statistics.median(durations.values()) if durations else UNKNOWN
    weights: dict[str, float] = {}
    for item in plan.items:
        if isinstance(item, Planned):
            cell = item.cell
            weights.setdefault(cell.id, 0)
            weights[cell.id] += durations.get((cell.image.name, cell.id), unknown)
    parts = partition_cells(weights, shard.count)

    def mark_item(item: Planned | Dropped) -> Planned | Dropped:
        if isinstance(item, Dropped) or parts[item.cell.id] == shard.number:
            return item
        return replace(item, status=PlanStatus.OTHER_SHARD)

    return replace(plan, shard=str(shard), items=tuple(map(mark_item, plan.items)))


def partition_cells(weights: Mapping[str, float], count: int) -> dict[str, int]:
    """Return for each cell the number of its shard, 1 to `count`, with about equal sums of weights.

    The longest goes first, to the shard with the least so far (Graham 1969: at most 4/3 - 1/(3 `count`) times
    the optimum). Ties are broken by the order of `weights`.
    """
    shards = [(0.0, 0, number) for number in range(1, count + 1)]  # a heap: load, cells, number
    parts = {}
    for cell in sorted(weights, key=lambda name: -weights[name]):
        load, cells, number = shards[0]
        heapq.heapreplace(shards, (load + weights[cell], cells + 1, number))
        parts[cell] = number
    return parts
