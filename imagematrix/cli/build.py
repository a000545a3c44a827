"""`imagematrix build`: build, audit and tag what is not there yet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.options import DurationsFiles, File, Json, Only, ShardOf
from imagematrix.cli.output import answer, complain, counted, say
from imagematrix.cli.planning import planned, sharding, workshop
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.build.build import Result
    from imagematrix.build.outcome import Outcome
    from imagematrix.errors import ImagematrixError

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
        list[str] | None,
        typer.Option(
            metavar="NAME[=JOBS]", help="Build on this builder of buildx, JOBS at a time; may be repeated."
        ),
    ] = None,
    attest: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC", help="Attach provenance or an SBOM, as docker buildx build --attest; with --push."
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify-reproducible", help="Build everything twice, and fail where bytes differ."),
    ] = False,
    shard: ShardOf = None,
    durations: DurationsFiles = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write a JUnit XML report as well.")
    ] = None,
    json: Json = False,
) -> None:
    """Build, audit and tag the images that are not there yet; print the references of the new ones."""
    from imagematrix.build import lock
    from imagematrix.build.build import build, failure, report
    from imagematrix.build.outcome import parse
    from imagematrix.cli import ci
    from imagematrix.cli.progress import progress

    narrow = sharding(shard, durations)
    if junit:
        _write(junit, ())  # that it can't be written is better known before an hour of builds
    with workshop(jobs, push=push, builders=builder or (), attest=attest or ()) as shop:
        whole = planned(file, shop.against, only, push=push, frozen=frozen)
        lock.extend(lock.beside(file), whole.bases)
        plan = narrow(whole)
        todo = plan.with_status("build", "adopt", *(["up-to-date"] if verify else []))
        if todo and not shop.reproducible:
            say("the engine has the classic image store: timestamps stay, and a second build differs in them")
        logs = file.parent / ".imagematrix" / "logs"
        results: list[Result] = []
        try:
            # Where there is nothing to do, nobody waits for builders to be found.
            if todo or plan.with_status("refused"):
                with progress(todo) as reporter:
                    results = build(
                        plan,
                        shop.builder,
                        shop.store,
                        jobs=shop.jobs,
                        logs=logs,
                        reporter=reporter,
                        fail_fast=fail_fast,
                        verify=verify,
                    )
        except (KeyboardInterrupt, SystemExit):
            say("stopped: what is built stays, and the next build goes on from here")
            raise
    document = report(plan, results)
    if json:
        answer(document)
    else:
        for result in results:
            if result.status in ("built", "adopted"):
                print(result.item.reference)
    done = {id(result.item) for result in results}
    _conclude(len(results), sum(id(item) not in done for item in plan.with_status("up-to-date")))
    error = failure(results)
    _explain(results, told=error)
    outcomes = parse(document, "build").outcomes
    ci.write_summary(outcomes)
    if junit:
        _write(junit, outcomes)
    if error:
        raise error


def _conclude(done: int, up_to_date: int) -> None:
    if done == 0:
        say(f"nothing to build: {counted(up_to_date, 'image')} up to date")
    elif up_to_date:
        say(f"{counted(up_to_date, 'image')} more up to date")


def _write(path: Path, outcomes: Sequence[Outcome]) -> None:
    from imagematrix.build.junit import junit
    from imagematrix.build.logs import said

    try:
        path.write_bytes(junit(outcomes, lambda outcome: said(outcome.log, outcome.error or "")))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error


def _explain(results: Sequence[Result], *, told: ImagematrixError | None) -> None:
    """Say of each cell that failed why, in the words of the CI system that runs this, if one does.

    The error `told` is that of them all, and is said last.
    """
    from imagematrix.build.logs import headline, said
    from imagematrix.build.naming import naming
    from imagematrix.cli import ci

    name = naming(result.item for result in results)
    system = ci.system()
    for result in results:
        error = result.error
        if result.status != "failed" or error is None or error is told:
            continue
        if system:
            text = said(result.log, "\n".join(filter(None, (str(error), error.remedy))))
            say(ci.failed(system, name(result.item), headline(str(error)), text))
            continue
        log = f" (log: {result.log})" if result.log else ""
        say(f"\n{name(result.item)}{log}")
        complain(error)
