"""`imagematrix build`: build, audit and tag what is not there yet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.options import File, Json, Only
from imagematrix.cli.output import answer, complain, counted, say
from imagematrix.cli.planning import planned, workshop

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
    push: Annotated[
        bool, typer.Option("--push", help="Push to the registries that the images' names say.")
    ] = False,
    frozen: Annotated[
        bool, typer.Option("--frozen", help="Fail where imagematrix.lock lacks a base image.")
    ] = False,
    builder: Annotated[
        str | None, typer.Option("--builder", metavar="NAME", help="Build on this builder of buildx.")
    ] = None,
    json: Json = False,
) -> None:
    """Build, audit and tag the images that are not there yet; print the references of the new ones."""
    from imagematrix.build import lock
    from imagematrix.build.build import build, failure, report
    from imagematrix.cli.progress import progress

    with workshop(push=push, builder=builder) as shop:
        plan = planned(file, shop.against, only, push=push, frozen=frozen)
        lock.extend(lock.beside(file), plan.bases)
        todo = plan.with_status("build", "adopt")
        if todo and not shop.builder.reproducible:
            say("the engine has the classic image store: timestamps stay, and a second build differs in them")
        logs = file.parent / ".imagematrix" / "logs"
        try:
            with progress(len(todo)) as reporter:
                results = build(
                    plan,
                    shop.builder,
                    shop.store,
                    jobs=jobs,
                    logs=logs,
                    reporter=reporter,
                    fail_fast=fail_fast,
                )
        except (KeyboardInterrupt, SystemExit):
            say("stopped: what is built stays, and the next build goes on from here")
            raise
    if json:
        answer(report(plan, results))
    else:
        for result in results:
            if result.there:
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
