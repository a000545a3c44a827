"""Merging Build documents: the outcome of every cell, wherever it was built."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.builder.result import SCHEMA
from imagematrix.errors import BuildError
from imagematrix.planning.shard import Shard
from imagematrix.reports.outcome import BUILT, DROPPED, MISSING, OPEN, STATUSES
from imagematrix.text import plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from imagematrix.reports.outcome import Outcome, Report

__all__ = ["Merged", "merge"]

SHOWN = 20  # cells listed in a message before "and N more"
PRECEDENCE = {status: place for place, status in enumerate(STATUSES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The outcome of every cell, in the order of the documents.

    `missing` are the shards, such as "3/8", that have no document although other shards have one.
    """

    outcomes: tuple[Outcome, ...]
    missing: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """Return the Build document, in which a cell without a known outcome is "missing"."""
        return {
            "schema": SCHEMA,
            "shard": None,
            "cells": [
                {**outcome.data, "status": MISSING} if outcome.status in OPEN else dict(outcome.data)
                for outcome in self.outcomes
            ],
        }

    def failure(self) -> BuildError | None:
        """Return the error that names the cells that were not built, or None."""
        buildable = [outcome for outcome in self.outcomes if outcome.status not in DROPPED]
        absent = [outcome for outcome in buildable if outcome.status in OPEN]
        failed = [outcome for outcome in buildable if outcome.status not in (*BUILT, *OPEN)]
        if not (failed or absent or self.missing):
            return None
        lines = [f"{len(failed) + len(absent)} of {len(buildable)} images were not built"]
        if failed:
            lines.append(f"failed or stopped: {_names(failed)}")
        if absent:
            lines.append(f"no document has the outcome of: {_names(absent)}")
        if self.missing:
            lines.append(f"no document for the shards: {_listed(self.missing)}")
        remedy = "run these again, and add their documents"
        return BuildError("\n  ".join(lines), remedy=remedy)


def merge(reports: Iterable[Report]) -> Merged:
    """Return the outcomes of all `reports`; a cell that failed in one and was built in another is built.

    Reads one report at a time. Raises BuildError if two documents contradict each other: a cell was built
    from different inputs or into different images, or it is excluded in one and built in another.
    """
    best: dict[tuple[str, str, str], Outcome] = {}
    contradictions: list[str] = []
    seen: set[Shard] = set()
    for report in reports:
        if report.shard is not None:
            seen.add(Shard.parse(report.shard))
        for outcome in report.outcomes:
            other = best.setdefault(outcome.key, outcome)
            if other is not outcome:
                contradictions += _contradictions(other, outcome)
                best[outcome.key] = min(other, outcome, key=lambda one: PRECEDENCE[one.status])
    if contradictions:
        more = f"\n  and {len(contradictions) - SHOWN} more" if len(contradictions) > SHOWN else ""
        raise BuildError(
            "the documents contradict each other:\n  " + "\n  ".join(contradictions[:SHOWN]) + more,
            remedy="merge the documents of one run only",
        )
    numbers = {
        Shard(number=number, count=count)
        for count in {shard.count for shard in seen}
        for number in range(1, count + 1)
    }
    absent = sorted(numbers - seen, key=lambda shard: (shard.count, shard.number))
    return Merged(outcomes=tuple(best.values()), missing=tuple(map(str, absent)))


def _contradictions(one: Outcome, other: Outcome) -> list[str]:
    if one.status in DROPPED or other.status in DROPPED:
        pairs = [(one.status, other.status)] if one.status != other.status else []
    elif one.status in OPEN or other.status in OPEN:
        # A report decides only about the cells of its own shard; other shards may have other base images.
        pairs = []
    else:
        pairs = [(f"input {one.input}", f"input {other.input}")] if _differ(one.input, other.input) else []
        if _differ(one.digest, other.digest):
            pairs.append((str(one.digest), str(other.digest)))
    return [f"{_name(one)}: {left} in {one.where}, {right} in {other.where}" for left, right in pairs]


def _differ(one: str | None, other: str | None) -> bool:
    return None not in (one, other) and one != other


def _name(outcome: Outcome) -> str:
    return plain(f"{outcome.image}:{outcome.version} {outcome.cell}")


def _names(outcomes: Sequence[Outcome]) -> str:
    return _listed([_name(outcome) for outcome in outcomes])


def _listed(words: Sequence[str]) -> str:
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more
