"""Merging Build documents: the outcome of every cell, wherever it was built."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.build.executor.result import SCHEMA
from imagematrix.build.plan.plan import DropStatus
from imagematrix.build.plan.shard import Shard
from imagematrix.build.reports.outcome import BUILT, DROPPED, MISSING, OPEN, STATUSES
from imagematrix.common.text import shorten_lines, shorten_words, strip_escapes
from imagematrix.errors import BuildError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from imagematrix.build.reports.outcome import Outcome, Report

SHOWN = 20  # cells listed in a message before "and N more"
PRECEDENCE = {status: place for place, status in enumerate(STATUSES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedReport:
    """The outcome of every cell, in the order of the documents.

    `missing` are the shards, such as "3/8", that have no document although other shards have one, if the
    outcome of a cell is not known. `errors` are those that ended builds as a whole, each with its document.
    """

    outcomes: tuple[Outcome, ...]
    missing: tuple[str, ...]
    errors: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the Build document, in which a cell without a known outcome is "missing"."""
        return {
            "schema": SCHEMA,
            "shard": None,
            "error": "\n".join(self.errors) if self.errors and self.find_failure() else None,
            "for": None,
            "cells": [
                {**outcome.data, "status": MISSING} if outcome.status in OPEN else dict(outcome.data)
                for outcome in self.outcomes
            ],
        }

    def find_failure(self) -> BuildError | None:
        """Return the error that names the cells that were not built, or None."""
        buildable = [outcome for outcome in self.outcomes if outcome.status not in DROPPED]
        absent = [outcome for outcome in buildable if outcome.status in OPEN]
        failed = [outcome for outcome in buildable if outcome.status not in (*BUILT, *OPEN)]
        # A build that ended is made good by another that built its cells.
        if not (failed or absent or self.missing or (self.errors and not self.outcomes)):
            return None
        lines = [f"{len(failed) + len(absent)} of {len(buildable)} images were not built"]
        if failed:
            lines.append(f"failed or stopped: {_format_references(failed)}")
        if absent:
            lines.append(f"no document has the outcome of: {_format_references(absent)}")
        if self.missing:
            lines.append(f"no document for the shards: {shorten_words(self.missing, SHOWN)}")
        lines += self.errors
        remedy = "run these again, and add their documents"
        first, *details = lines
        return BuildError(first, *shorten_lines(details, len(details)), remedy=remedy)


def merge_reports(reports: Iterable[Report]) -> MergedReport:
    """Return the outcomes of all `reports`; a cell that failed in one and was built in another is built.

    Reads one report at a time. Raises BuildError if two documents contradict each other: a cell was built
    from different inputs or into different images, or it is excluded in one and built in another.
    """
    best: dict[tuple[str, str, str], Outcome] = {}
    errors: list[str] = []
    contradictions: list[str] = []
    shards: set[Shard] = set()
    for report in reports:
        if report.shard is not None:
            shards.add(Shard.parse(report.shard))
        if report.error is not None:
            errors.append(f"{report.where}: {report.error}")
        for outcome in report.outcomes:
            known = best.setdefault(outcome.key, outcome)
            if known is not outcome:
                contradictions += _find_contradictions(known, outcome)
                best[outcome.key] = min(known, outcome, key=lambda candidate: PRECEDENCE[candidate.status])
    if contradictions:
        raise BuildError(
            "the documents contradict each other:",
            *shorten_lines(contradictions, SHOWN),
            remedy="merge the documents of one run only",
        )
    numbers = {
        Shard(number=number, count=count)
        for count in {shard.count for shard in shards}
        for number in range(1, count + 1)
    }
    is_complete = best and not any(outcome.status in OPEN for outcome in best.values())
    missing_shards = (
        [] if is_complete else sorted(numbers - shards, key=lambda shard: (shard.count, shard.number))
    )
    return MergedReport(
        outcomes=tuple(best.values()), missing=tuple(map(str, missing_shards)), errors=tuple(errors)
    )


def _find_contradictions(first: Outcome, second: Outcome) -> list[str]:
    statuses = {first.status, second.status}
    if DropStatus.UNNEEDED in statuses and statuses.isdisjoint(
        [*OPEN, DropStatus.EXCLUDED, DropStatus.INFEASIBLE]
    ):
        pairs = []  # what was built may have shown that hosts need the cell
    elif first.status in DROPPED or second.status in DROPPED:
        pairs = [(first.status, second.status)] if first.status != second.status else []
    elif first.status in OPEN or second.status in OPEN:
        # A report decides only about the cells of its own shard; other shards may have other base images.
        pairs = []
    else:
        pairs = (
            [(f"input {first.input}", f"input {second.input}")]
            if _is_different(first.input, second.input)
            else []
        )
        if _is_different(first.digest, second.digest):
            differ = _is_different(first.libzstd, second.libzstd)
            pairs.append((_describe_build(first, libzstd=differ), _describe_build(second, libzstd=differ)))
    return [
        f"{_format_reference(first)}: {left} in {first.where}, {right} in {second.where}"
        for left, right in pairs
    ]


def _describe_build(outcome: Outcome, *, libzstd: bool) -> str:
    return f"{outcome.digest} by libzstd {outcome.libzstd}" if libzstd else str(outcome.digest)


def _is_different(first: str | None, other: str | None) -> bool:
    return None not in (first, other) and first != other


def _format_reference(outcome: Outcome) -> str:
    return strip_escapes(f"{outcome.image}:{outcome.version} {outcome.cell}")


def _format_references(outcomes: Sequence[Outcome]) -> str:
    return shorten_words([_format_reference(outcome) for outcome in outcomes], SHOWN)
