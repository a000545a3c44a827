"""`imagematrix build`: build, audit and tag what is not there yet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.options import File, Json, Only
from imagematrix.cli.output import answer, complain, counted, say
from imagematrix.cli.planning import planned

__all__ = ["command"]


def command(
    file: File = Path("matrix.yaml"),
    only: Only = None,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, metavar="N", help="Builds at the same time.")
    ] = min(4, os.cpu_count() or 1),
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="Stop at the first failure; without it the rest is built.")
    ] = False,
    json: Json = False,
) -> None:
    """Build, audit and tag the images that are not there yet; print the references of the new ones."""
    from imagematrix.build.build import build, failure, report
    from imagematrix.build.buildx import Buildx
    from imagematrix.cli.progress import progress

    with Buildx() as backend:
        plan = planned(file, backend, only)
        todo = plan.with_status("build")
        if todo and not backend.reproducible:
            say("the engine has the classic image store: timestamps stay, and a second build differs in them")
        logs = file.parent / ".imagematrix" / "logs"
        try:
            with progress(len(todo)) as reporter:
                results = build(plan, backend, jobs=jobs, logs=logs, reporter=reporter, fail_fast=fail_fast)
        except (KeyboardInterrupt, SystemExit):
            say("stopped: what is built stays, and the next build goes on from here")
            raise
    if json:
        answer(report(plan, results))
    else:
        for result in results:
            if result.status == "built":
                print(result.item.reference)
    _conclude(len(results), len(plan.with_status("up-to-date")))
    error = failure(results)
    for result in results:
        if result.status == "failed" and result.error and result.error is not error:
            say(f"\n{result.item.cell.id} (log: {result.log})")
            complain(result.error)
    if error:
        raise error


def _conclude(done: int, up_to_date: int) -> None:
    if done == 0:
        say(f"nothing to build: {counted(up_to_date, 'image')} up to date")
    elif up_to_date:
        say(f"{counted(up_to_date, 'image')} more up to date")
