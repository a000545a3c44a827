"""`imagematrix render`: the Dockerfiles of a matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.shared.build_session import plan_with_lock
from imagematrix.cli.shared.options import AllowContext, File, Only, Platforms
from imagematrix.cli.shared.output import print_document, print_info, report_write_errors
from imagematrix.common import files
from imagematrix.errors import UsageError


def command(
    file: File = Path("matrix.yaml"),
    only: Only = None,
    platform: Platforms = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Write one file for each cell to DIR."),
    ] = None,
    allow_context: AllowContext = None,
) -> None:
    """Write the Dockerfiles to a folder, or that of a single cell to stdout."""
    from imagematrix.build.plan.plan import PlanContext, PlanStatus

    # A cell fails here if it lacks files; its Dockerfile does not need them.
    plan = plan_with_lock(file, PlanContext(), only, platforms=platform or (), contexts=allow_context or ())
    items = plan.with_status(PlanStatus.BUILD, PlanStatus.FAILED)
    if output is None:
        if len(items) != 1:
            remedy = "select one with --only, or write them to a folder with -o DIR"
            raise UsageError(f"cannot write {len(items)} Dockerfiles to stdout", remedy=remedy)
        print_document(items[0].dockerfile, "write it to a folder with -o DIR")
        return
    with report_write_errors():
        for item in items:
            image = item.cell.image
            folder = output / image.name / f"{image.version}-{item.cell.id}"
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / "Dockerfile"
            with files.name_file_in_errors(file):
                file.write_text(item.dockerfile, encoding="utf-8")
    print_info(f"wrote {len(items)} Dockerfiles to {output}")
