"""A matrix as the jobs of a CI system: one for each cell, or shards if there are too many cells.

A job calls `imagematrix build --only ONLY --shard SHARD` with its two values, one of which may select
everything. All images of one cell are in one job, because an image may build on another.
"""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.build.plan.shard import Shard
from imagematrix.common.groups import group_values
from imagematrix.errors import UsageError
from imagematrix.images.catalog import axis_conditions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.build.matrix.matrix import Cell

WHOLE = Shard(number=1, count=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job: its name, its values for --only and --shard, and the platforms of its cells."""

    name: str
    only: str
    shard: Shard
    platforms: tuple[str, ...]


def split_jobs(
    cells: Iterable[Cell], limit: int, *, expression: str, wanted: int | None = None
) -> tuple[Job, ...]:
    """Return the jobs that build `cells`, which `--only` with `expression` selects.

    There are `wanted` jobs, or else one for each cell, but never more than `limit`. Raises UsageError if
    no cell can be built, or `wanted` exceeds the limit.
    """
    by_id = group_values((cell.id, cell) for cell in cells)
    if not by_id:
        raise UsageError("no cell can be built, and CI systems reject an empty matrix")
    if wanted is not None and wanted > limit:
        raise UsageError(f"invalid number of jobs: {wanted} exceeds the limit of {limit} for one matrix")
    count = min(len(by_id), wanted or limit)
    if count == len(by_id):
        # A job selects its cell with all images, or only with those that `expression` selects.
        by_image = "image" in axis_conditions.parse_only(expression) if expression else False
        jobs = []
        for name, group in by_id.items():
            words = [f"{axis}={value}" for axis, value in group[0].axes.items()]
            words += [f"image={cell.image.name}" for cell in group if by_image]
            platforms = (group[0].platform,)
            jobs.append(Job(name=name, only=",".join(words), shard=WHOLE, platforms=platforms))
        return tuple(jobs)
    # The build distributes the cells, by durations too, so each shard may get cells of every platform.
    all_platforms = tuple(dict.fromkeys(cell.platform for cell, *_ in by_id.values()))
    return tuple(
        Job(
            name=f"shard-{number}-of-{count}",
            only=expression,
            shard=Shard(number=number, count=count),
            platforms=all_platforms,
        )
        for number in range(1, count + 1)
    )
