"""Outcomes: the entries of a Build document. A Plan document lists the cells."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from imagematrix.build.executor import result
from imagematrix.build.executor.result import STORED_STATUSES, BuildStatus
from imagematrix.build.plan import plan
from imagematrix.build.plan.plan import DropStatus, PlanStatus
from imagematrix.common import json_documents

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path
    from typing import Any

    from imagematrix.build.plan.shard import Durations

MISSING = "missing"  # in a merged document: no report has an outcome of the cell
BUILT = (*STORED_STATUSES, PlanStatus.UP_TO_DATE)
# The outcome is not known yet.
OPEN = (PlanStatus.BUILD, PlanStatus.ADOPT, PlanStatus.REFUSED, PlanStatus.OTHER_SHARD, MISSING)
DROPPED = tuple(DropStatus)
# Every status, the most conclusive first.
STATUSES: tuple[str, ...] = (
    *BUILT,
    BuildStatus.FAILED,
    BuildStatus.SKIPPED,
    BuildStatus.STOPPED,
    *OPEN,
    *DROPPED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The entry of one cell in the document `where`; `data` is its JSON object, unchanged.

    `test` is what came of the image's test, if it has one, and `test_why` why.
    """

    image: str
    version: str
    cell: str
    status: str
    input: str | None
    digest: str | None
    seconds: float | None
    log: str | None
    error: str | None
    libzstd: str | None
    where: str
    data: Mapping[str, Any]
    test: str | None = None
    test_why: str | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """The key of the cell in its matrix: image, version and cell."""
        return self.image, self.version, self.cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A Build document or a Plan document; `shard` is its part, such as "2/8", or None for a whole matrix.

    `error` ended the build as a whole. `hosts` is what it says of the hosts of `--for`, or None.
    """

    where: str
    shard: str | None
    outcomes: tuple[Outcome, ...]
    error: str | None = None
    hosts: json_documents.Fields | None = None


def load_report(path: str | Path) -> Report:
    """Return the document in the file `path`; raise UsageError if it is invalid."""
    return parse_report(json_documents.read_json(path), str(path))


def parse_report(data: object, where: str) -> Report:
    """Return the document `data`; `where` names it in messages."""
    fields = json_documents.Fields(data, where)
    is_plan = fields.get_text("schema") == plan.SCHEMA
    if not is_plan:
        fields.require_schema(result.SCHEMA)
    if not fields.has("cells"):
        raise fields.fail("cells", "is missing")
    return Report(
        where=where,
        shard=fields.get_text_or_none("shard"),
        outcomes=tuple(_parse_outcome(cell, where, is_plan=is_plan) for cell in fields.list_objects("cells")),
        error=fields.get_text_or_none("error"),
        hosts=fields.get_object_or_none("for"),
    )


def _parse_outcome(fields: json_documents.Fields, where: str, *, is_plan: bool) -> Outcome:
    status = fields.get_text("status")
    if status not in STATUSES:
        raise fields.fail("status", f"{status!r} is not one of {', '.join(STATUSES)}")
    if is_plan and status == PlanStatus.UP_TO_DATE:
        status = PlanStatus.BUILD  # the plan looked into its own engine; the build job has another one
    test = fields.get_object_or_none("test")
    return Outcome(
        image=fields.get_text("image"),
        version=fields.get_text("version"),
        cell=fields.get_text("cell"),
        status=status,
        input=fields.get_text_or_none("input"),
        digest=fields.get_text_or_none("digest"),
        seconds=fields.get_number_or_none("seconds"),
        libzstd=fields.get_text_or_none("libzstd"),
        log=fields.get_text_or_none("log"),
        error=fields.get_text_or_none("error"),
        where=where,
        data=fields.data,
        test=test.get_text("outcome") if test else None,
        test_why=test.get_text_or_none("why") if test else None,
    )


def compute_durations(reports: Iterable[Report]) -> Durations:
    """Return how many seconds each cell took to build: the median over `reports`, in any order.

    Versions are ignored: a new version takes about as long.
    """
    times: dict[tuple[str, str], list[float]] = {}
    for report in reports:
        for outcome in report.outcomes:
            if outcome.status == BuildStatus.BUILT and outcome.seconds is not None:
                times.setdefault((outcome.image, outcome.cell), []).append(outcome.seconds)
    return {key: statistics.median(seconds) for key, seconds in times.items()}
