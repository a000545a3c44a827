"""A matrix as the job matrix of a GitHub Actions workflow."""

from __future__ import annotations

import json

from imagematrix.integrations.export.export_target import ExportTarget
from imagematrix.integrations.export.jobs import split_jobs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.integrations.export.export_target import ExportSource
    from imagematrix.integrations.export.jobs import Job

LIMIT = 256  # jobs of a matrix: docs.github.com, "Workflow syntax", jobs.<job_id>.strategy.matrix


def make_github_matrix(jobs: Iterable[Job]) -> str:
    """Return the JSON for `strategy.matrix` through `fromJSON`, on one line because outputs require it."""
    include = [
        {
            "name": job.name,
            "only": job.only,
            "shard": str(job.shard),
            "platforms": ",".join(job.platforms),
        }
        for job in jobs
    ]
    return json.dumps({"include": include}, separators=(",", ":")) + "\n"


def _make_files(source: ExportSource, wanted: int | None) -> dict[str, str]:
    return {
        "github.json": make_github_matrix(
            split_jobs(source.list_cells(), LIMIT, expression=source.expression, wanted=wanted)
        )
    }


TARGET = ExportTarget(name="github", help="JSON for a job matrix", files=_make_files)
