"""`imagematrix export`: the same matrix for another tool."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.options import File, Only
from imagematrix.cli.output import counted, say
from imagematrix.cli.planning import planned, workshop
from imagematrix.errors import TagMovedError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Target", "command"]


class Target(enum.StrEnum):
    """What can be written."""

    GITHUB = "github"
    GITLAB = "gitlab"
    BAKE = "bake"


def command(
    target: Annotated[
        Target,
        typer.Argument(
            help="github: JSON for a job matrix; gitlab: a child pipeline; bake: JSON for docker buildx bake."
        ),
    ],
    file: File = Path("matrix.yaml"),
    only: Only = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            min=1,
            metavar="N",
            help="At most N jobs, each a shard; without it one for each cell, if the CI has as many.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write to files in DIR.")
    ] = None,
) -> None:
    """Write the matrix as the jobs of a CI system, or for docker buildx bake."""
    if target is Target.BAKE:
        if jobs is not None:
            raise UsageError("--jobs is for CI systems: bake decides itself what it builds at the same time")
        files = _bake(file, only)
    else:
        files = _jobs(target, file, only, jobs)
    if output is None:
        if len(files) > 1:
            remedy = "write them to a folder with -o DIR, or narrow the cells down with --only"
            raise UsageError(f"this takes {len(files)} files, and stdout takes one", remedy=remedy)
        sys.stdout.write("".join(files.values()))
        return
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (output / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    say(f"{counted(len(files), 'file')} written to {output}")


def _jobs(target: Target, file: Path, only: str | None, wanted: int | None) -> Mapping[str, str]:
    from imagematrix.export import jobs
    from imagematrix.planning.plan import Against

    cells = [item.cell for item in planned(file, Against(), only).with_status("build")]
    limit = jobs.GITHUB_LIMIT if target is Target.GITHUB else jobs.GITLAB_LIMIT
    found = jobs.jobs(cells, limit, expression=only or "", wanted=wanted)
    if target is Target.GITHUB:
        return {"github.json": jobs.github(found)}
    return {"gitlab.yml": jobs.gitlab(found)}


def _bake(file: Path, only: str | None) -> Mapping[str, str]:
    from functools import partial

    from imagematrix.builder.build import ordered
    from imagematrix.builder.compiler import Compilers
    from imagematrix.export.bake import bake, name
    from imagematrix.planning.given import Given

    with workshop(push=False, given=Given()) as shop:
        plan = planned(file, shop.against, only)
        refused = plan.with_status("refused")
        if refused:
            remedy = "see `imagematrix plan`, and raise the version in matrix.yaml"
            raise TagMovedError(f"a version would change in {counted(len(refused), 'cell')}", remedy=remedy)
        for item in plan.with_status("failed"):
            raise UsageError(f"{item.cell.id}: {item.why}")
        items = plan.with_status("build", "up-to-date")
        if not items:
            raise UsageError("no cell can be built: there is nothing to export")
        compilers = Compilers(items, shop.builder)
        pins = {base: shop.builder.pinned(base, digest) for base, digest in plan.bases.items()}
        orders = []
        for item in items:
            images = {base: where for base in item.bases if (where := pins[base])}
            images |= {need: f"target:{name(need)}" for need in item.needs}
            sources = plan.given.sources(item.cell, item.cell.image.context, images)
            orders.append(ordered(item, sources, partial(compilers.flags, item, sources)))
        return bake(orders)
