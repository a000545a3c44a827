"""What a Build document says of each cell, read back; a Plan document says which cells there are."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from imagematrix import documents
from imagematrix.builder import build
from imagematrix.planning import plan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path
    from typing import Any

    from imagematrix.planning.shard import Durations

__all__ = ["BUILT", "OPEN", "STATUSES", "UNBUILDABLE", "Outcome", "Report", "durations", "load", "parse"]

BUILT = ("built", "adopted", "verified", "up-to-date")
OPEN = ("build", "adopt", "refused", "other-shard", "missing")  # it is not said what became of the cell
UNBUILDABLE = ("excluded", "infeasible")
STATUSES = (*BUILT, "failed", "skipped", "stopped", *OPEN, *UNBUILDABLE)  # what says most of a cell first


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the document `where` says of one cell; `data` is all of it, as it stands there."""

    image: str
    version: str
    cell: str
    status: str
    input: str | None
    digest: str | None
    seconds: float | None
    log: str | None
    error: str | None
    where: str
    data: Mapping[str, Any]

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from all other cells of a matrix."""
        return self.image, self.version, self.cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A Build document, or a Plan document; `shard` is such as "2/8", or None for a whole matrix."""

    where: str
    shard: str | None
    outcomes: tuple[Outcome, ...]


def load(path: str | Path) -> Report:
    """Return the document in the file `path`; raise UsageError where it is none, or damaged."""
    return parse(documents.read(path), str(path))


def parse(data: object, where: str) -> Report:
    """Return the document `data`; `where` names it in messages."""
    fields = documents.Fields(data, where)
    planned = fields.text("schema") == plan.SCHEMA
    if not planned:
        fields.schema(build.SCHEMA)
    if not fields.present("cells"):
        raise fields.fail("cells", "is missing")
    return Report(
        where=where,
        shard=fields.text_or_none("shard"),
        outcomes=tuple(_outcome(cell, where, planned=planned) for cell in fields.objects("cells")),
    )


def _outcome(fields: documents.Fields, where: str, *, planned: bool) -> Outcome:
    status = fields.text("status")
    if status not in STATUSES:
        raise fields.fail("status", f"{status!r} is none of {', '.join(STATUSES)}")
    if planned and status == "up-to-date":
        status = "build"  # in the engine of who planned; a job that builds may have another, and fail
    return Outcome(
        image=fields.text("image"),
        version=fields.text("version"),
        cell=fields.text("cell"),
        status=status,
        input=fields.text_or_none("input"),
        digest=fields.text_or_none("digest"),
        seconds=fields.number_or_none("seconds"),
        log=fields.text_or_none("log"),
        error=fields.text_or_none("error"),
        where=where,
        data=fields.data,
    )


def durations(reports: Iterable[Report]) -> Durations:
    """Return how long each cell took to build: the median of what `reports` say, in whatever order they are.

    The version does not matter: a raised one takes about as long.
    """
    known: dict[tuple[str, str], list[float]] = {}
    for report in reports:
        for outcome in report.outcomes:
            if outcome.status == "built" and outcome.seconds is not None:
                known.setdefault((outcome.image, outcome.cell), []).append(outcome.seconds)
    return {key: statistics.median(seconds) for key, seconds in known.items()}
