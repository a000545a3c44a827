"""A matrix as a child pipeline of GitLab CI."""

from __future__ import annotations

from imagematrix.integrations.export.export_target import ExportTarget
from imagematrix.integrations.export.jobs import split_jobs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.integrations.export.export_target import ExportSource
    from imagematrix.integrations.export.jobs import Job

LIMIT = 200  # jobs of parallel:matrix: docs.gitlab.com, "CI/CD YAML syntax reference"


def make_gitlab_pipeline(jobs: Iterable[Job]) -> str:
    """Return a child pipeline: the job `build`, once for each of `jobs`.

    It extends the job `.build`, which another file of the pipeline defines.
    """
    import yaml

    matrix = [{"ONLY": job.only, "SHARD": str(job.shard)} for job in jobs]
    pipeline = {"build": {"extends": ".build", "parallel": {"matrix": matrix}}}
    return str(yaml.safe_dump(pipeline, sort_keys=False, width=1_000))


def _make_files(source: ExportSource, wanted: int | None) -> dict[str, str]:
    return {
        "gitlab.yml": make_gitlab_pipeline(
            split_jobs(source.list_cells(), LIMIT, expression=source.expression, wanted=wanted)
        )
    }


TARGET = ExportTarget(name="gitlab", help="a child pipeline", files=_make_files)
