"""A matrix as the jobs of a CI system: one for each cell, or shards of cells where those are too many.

A job calls `imagematrix build --only ONLY --shard SHARD` with its two values, of which one may narrow nothing
down. All images of one cell are in one job, for an image may build on that of another.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from imagematrix.errors import UsageError
from imagematrix.planning.shard import Shard

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.matrix.matrix import Cell

__all__ = ["GITHUB_LIMIT", "GITLAB_LIMIT", "Job", "github", "gitlab", "jobs"]

GITHUB_LIMIT = 256  # jobs of a matrix: docs.github.com, "Workflow syntax", jobs.<job_id>.strategy.matrix
GITLAB_LIMIT = 200  # jobs of parallel:matrix: docs.gitlab.com, "CI/CD YAML syntax reference"
WHOLE = Shard(number=1, count=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job: what it is called, what it gives to --only and --shard, and the platforms of its cells."""

    name: str
    only: str
    shard: Shard
    platforms: tuple[str, ...]


def jobs(cells: Iterable[Cell], limit: int, *, expression: str, wanted: int | None = None) -> tuple[Job, ...]:
    """Return the jobs that build `cells`, which are those that `--only` with `expression` leaves.

    There are `wanted` jobs, or one for each cell, where both would do no more than `limit`. Raises UsageError
    where there is no cell, or more jobs are wanted than the system has.
    """
    by_id = {cell.id: cell for cell in cells}
    if not by_id:
        raise UsageError("no cell can be built, and a CI system takes no empty matrix")
    if wanted is not None and wanted > limit:
        raise UsageError(f"{wanted} jobs are more than the {limit} that one matrix can have")
    count = min(len(by_id), wanted or limit)
    if count == len(by_id):
        return tuple(
            Job(name=name, only=_only(cell), shard=WHOLE, platforms=(cell.platform,))
            for name, cell in by_id.items()
        )
    platforms = tuple(dict.fromkeys(cell.platform for cell in by_id.values()))
    return tuple(
        Job(
            name=f"shard-{number}-of-{count}",
            only=expression,
            shard=Shard(number=number, count=count),
            platforms=platforms,
        )
        for number in range(1, count + 1)
    )


def github(found: Iterable[Job]) -> str:
    """Return the JSON that `strategy.matrix` takes through `fromJSON`, in one line as outputs are."""
    include = [
        {
            "name": job.name,
            "only": job.only,
            "shard": str(job.shard),
            "platforms": ",".join(job.platforms),
        }
        for job in found
    ]
    return json.dumps({"include": include}, separators=(",", ":")) + "\n"


def gitlab(found: Iterable[Job]) -> str:
    """Return a child pipeline: the job `build`, once for each of `found`.

    What it does is in the job `.build`, which it extends and which another file of the pipeline has.
    """
    import yaml

    matrix = [{"ONLY": job.only, "SHARD": str(job.shard)} for job in found]
    pipeline = {"build": {"extends": ".build", "parallel": {"matrix": matrix}}}
    return str(yaml.safe_dump(pipeline, sort_keys=False, width=1_000))


def _only(cell: Cell) -> str:
    return ",".join(f"{axis}={value}" for axis, value in cell.axes.items())
