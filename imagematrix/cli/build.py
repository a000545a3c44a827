"""`imagematrix build`: build, audit and tag missing images."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.shared.build_session import (
    BuildOptions,
    lock_and_plan,
    make_shard_filter,
    open_build_session,
    warn_of_doubtful_emulators,
)
from imagematrix.cli.shared.host_filter import load_host_needs
from imagematrix.cli.shared.options import (
    AllowContext,
    AtMost,
    BuildArgs,
    Builders,
    DurationsFiles,
    File,
    ForHosts,
    Json,
    Only,
    Platforms,
    Proxy,
    ShardOf,
)
from imagematrix.cli.shared.output import (
    print_error,
    print_info,
    print_info_raw,
    print_json,
    print_text,
    report_write_errors,
    warn,
)
from imagematrix.common.suggestions import require_known
from imagematrix.common.text import format_count, format_first, shorten_words
from imagematrix.errors import ImagematrixError, UsageError

EXAMPLE = "imagematrix build --only 'cuda>=12.4'"
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from imagematrix.build.executor.image_tester import ImageTester
    from imagematrix.build.executor.result import Result
    from imagematrix.build.plan.plan import Plan
    from imagematrix.build.reports.outcome import Outcome
    from imagematrix.cli.shared.build_session import BuildSession
    from imagematrix.cli.shared.progress import Progress

CLASSIC = (
    "the engine has the classic image store: timestamps are kept, so a second build differs, "
    "and the engine compresses the layers that it pushes (compression: engine); "
    "images are not audited before `imagematrix build --push` or `imagematrix verify NAME`"
)
SHOWN = 5  # cells that a message names


def command(
    file: File = Path("matrix.yaml"),
    only: Only = None,
    platform: Platforms = None,
    hosts: ForHosts = None,
    at_most: AtMost = None,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, metavar="N", help="Builds at the same time.")
    ] = min(4, 2 * (os.cpu_count() or 1)),
    fail_fast: Annotated[
        bool,
        typer.Option("--fail-fast", help="Stop at the first failure; by default the other cells are built."),
    ] = False,
    push: Annotated[
        bool, typer.Option("--push", help="Push to the registries in the images' names.")
    ] = False,
    frozen: Annotated[
        bool, typer.Option("--frozen", help="Fail if imagematrix.lock lacks a base image.")
    ] = False,
    builder: Builders = None,
    attest: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="Attach provenance or an SBOM, as docker buildx build --attest does; requires --push.",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify-reproducible", help="Build everything twice, and fail if bytes differ."),
    ] = False,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="Pass a secret that the matrix declares: id=ID, id=ID,src=FILE or id=ID,env=NAME; "
            "repeatable.",
        ),
    ] = None,
    ssh: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID[=SOCKET|KEY]", help="Pass an SSH agent or key that the matrix declares; repeatable."
        ),
    ] = None,
    build_arg: BuildArgs = None,
    proxy: Proxy = False,
    shard: ShardOf = None,
    durations: DurationsFiles = None,
    allow_context: AllowContext = None,
    no_cache: Annotated[
        bool,
        typer.Option(
            "--no-cache", help="Run every step of the missing images, and use nothing of earlier builds."
        ),
    ] = False,
    retest: Annotated[
        bool, typer.Option("--retest", help="Test images that are up to date again, too.")
    ] = False,
    cache_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="Use results of steps from this place, as --cache-to wrote them: REF, or "
            "type=local,src=DIR; repeatable.",
        ),
    ] = None,
    cache_to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="Write results of steps to a repository of a registry, REF, or to a folder, "
            "type=local,dest=DIR; repeatable.",
        ),
    ] = None,
    progress: Annotated[
        str,
        typer.Option(
            metavar="{auto|plain|json}",
            help="auto: the state of builds; plain: their logs as well; json: each event as JSON, in a line.",
            autocompletion=lambda: ["auto", "plain", "json"],
        ),
    ] = "auto",
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write a JUnit XML report as well.")
    ] = None,
    json: Json = False,
) -> None:
    """Build, audit and tag missing images; print the references of the new ones.

    With --for, what the audits found decides again which cells the hosts need, and those that are then
    missing are built, too; not in a shard.
    """
    from imagematrix.build.executor.caches import ExternalCaches
    from imagematrix.build.executor.result import combine_failures, make_build_document
    from imagematrix.build.plan.build_inputs import parse_build_inputs
    from imagematrix.build.plan.plan import Plan
    from imagematrix.cli.shared.progress import KINDS
    from imagematrix.cli.shared.rebuild_loop import RebuildLoop

    require_known(progress, KINDS, "progress")
    if no_cache and cache_from:
        raise UsageError("--no-cache and --cache-from contradict each other", remedy="pass one of them")
    caches = ExternalCaches(cache_from or (), cache_to or ())
    narrow = make_shard_filter(shard, durations)
    needs = load_host_needs(hosts, at_most)
    options = BuildOptions(
        push=push,
        jobs=jobs,
        builders=builder or (),
        attest=attest or (),
        inputs=parse_build_inputs(secret or (), ssh or (), build_arg or (), proxy=proxy),
        verify=verify,
        no_cache=no_cache,
        caches=caches,
        retest=retest,
    )
    if junit:
        _write_junit(junit, ())  # report an unwritable path before an hour of builds
    rounds = RebuildLoop(narrow(Plan(items=(), bases={})), needs, adds=shard is None, progress_kind=progress)
    cause: BaseException | None = None
    tester: ImageTester | None = None
    with contextlib.ExitStack() as stack:
        try:
            session = stack.enter_context(open_build_session(options))
            tester = session.tester
            make_plan = partial(
                lock_and_plan,
                file,
                session.plan_context,
                only,
                platforms=platform or (),
                push=push,
                frozen=frozen,
                contexts=allow_context or (),
                needs=needs,
            )
            build_plan = partial(_build_plan, session, file, fail_fast=fail_fast, verify=verify)
            plan_builds = partial(_plan_builds, session, narrow, make_plan)
            rounds.run(plan_builds, build_plan, verify=verify, is_due=tester.is_due)
        except BaseException as ended:  # noqa: BLE001 - the outcome is reported in any case
            cause = ended
        with _defer_interrupts():
            results = rounds.results
            error = cause or combine_failures(results)
            if error is None and needs and shard is None:
                error = needs.find_unserved_error()
            document = make_build_document(rounds.plan, results, _format_fatal(cause, results), tester)
            _report_outcome(rounds.plan, results, error, document, json=json, junit=junit)
    if error:
        raise error


def _plan_builds(
    session: BuildSession, narrow: Callable[[Plan], Plan], make_plan: Callable[[], Plan]
) -> Plan:
    """Return the part of a plan to build, in which the cells have failed that no builder can build."""
    from imagematrix.build.plan.builder_choice import fail_missing

    plan = session.plan_executions(narrow(make_plan()))
    warn_of_doubtful_emulators(plan)
    return fail_missing(plan)


def _build_plan(
    session: BuildSession, file: Path, plan: Plan, reporter: Progress, *, fail_fast: bool, verify: bool
) -> None:
    """Build a plan of the matrix in `file`."""
    from imagematrix.build.executor.build import build
    from imagematrix.build.executor.cell_builder import BuildBackend

    builder = session.builder  # an engine that cannot build is an error first
    if session.builds_in_classic_store:
        print_info(CLASSIC)
    build(
        plan,
        BuildBackend(builder, session.store, session.layers, session.tester),
        jobs=session.jobs,
        logs=file.parent / ".imagematrix" / "logs",
        reporter=reporter,
        fail_fast=fail_fast,
        verify=verify,
    )


def _format_fatal(cause: BaseException | None, results: Sequence[Result]) -> str | None:
    """Return the message of the error that ended a build as a whole; `results` show that it was stopped."""
    if cause is None or isinstance(cause, ImagematrixError):
        return str(cause) if cause else None
    if isinstance(cause, (KeyboardInterrupt, SystemExit)):
        return None if results else "the build was stopped"
    return f"unexpected {type(cause).__name__}: {cause}".strip(": ")


@contextlib.contextmanager
def _defer_interrupts() -> Iterator[None]:
    """Defer further interrupts until the outcome has been reported."""
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {signal_number: signal.signal(signal_number, signal.SIG_IGN) for signal_number in ending}
    try:
        yield
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)


def _report_outcome(
    plan: Plan,
    results: Sequence[Result],
    error: BaseException | None,
    document: Mapping[str, object],
    *,
    json: bool,
    junit: Path | None,
) -> None:
    """Report the outcome of a build: to stdout, as JUnit XML, to the terminal and to the CI system.

    A report that fails does not prevent the others.
    """
    from imagematrix.build.executor.result import BuildStatus
    from imagematrix.build.plan.plan import PlanStatus
    from imagematrix.build.reports.outcome import parse_report
    from imagematrix.cli.shared import ci

    report = parse_report(document, "build")
    outcomes, fatal = report.outcomes, report.error
    # The last of the reports comes first.
    with contextlib.ExitStack() as reports:
        if junit:
            reports.callback(_write_junit, junit, outcomes, fatal)
        reports.callback(ci.write_summary, outcomes, fatal)
        reports.callback(_print_failures, results, overall=error)
        reports.callback(_print_warnings, results)
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            reports.callback(
                print_info, "stopped: finished images are kept, and the next build continues from here"
            )
        elif error is None or any(result.status is not BuildStatus.STOPPED for result in results):
            items = {id(result.item) for result in results}
            up_to_date = sum(id(item) not in items for item in plan.with_status(PlanStatus.UP_TO_DATE))
            reports.callback(_print_remarks, results, outcomes, up_to_date)
        if json:
            print_json(document)
        else:
            for result in results:
                if result.status in (BuildStatus.BUILT, BuildStatus.ADOPTED):
                    print_text(result.item.reference)
        sys.stdout.flush()


def _print_remarks(results: Sequence[Result], outcomes: Sequence[Outcome], up_to_date: int) -> None:
    """Print which images were not tested or are up to date, and what decides the bytes of the others."""
    from imagematrix.build.executor.image_tester import ImageTestOutcome

    untested: dict[str, list[str]] = {}  # cells by the reason
    for outcome in outcomes:
        if outcome.test == ImageTestOutcome.NOT_TESTED:
            untested.setdefault(outcome.test_why or "", []).append(outcome.cell)
    for why, names in untested.items():
        warn(f"not tested here: {shorten_words(names, SHOWN)}: {why}")

    # Their bytes may also depend on what others wrote to a cache, and on the release of libzstd.
    if imported := sum(result.imported_cache for result in results):
        print_info(f"{format_count(imported, 'image')} with results of steps from an imported cache")
    kinds = {
        f"{result.compression}{f' by libzstd {result.libzstd}' if result.libzstd else ''}"
        for result in results
        if result.compression
    }
    if kinds:
        print_info(f"compression of new layers: {', '.join(sorted(kinds))}")

    if not results:
        print_info(f"nothing to build: {format_count(up_to_date, 'image')} up to date")
    elif up_to_date:
        print_info(f"{format_count(up_to_date, 'image')} more up to date")


def _write_junit(path: Path, outcomes: Sequence[Outcome], fatal: str | None = None) -> None:
    from imagematrix.build.executor.logs import shorten_log
    from imagematrix.build.reports.junit import format_junit
    from imagematrix.common import files

    with report_write_errors(path):
        files.write_output(
            path, format_junit(outcomes, lambda outcome: shorten_log(outcome.log, outcome.error or ""), fatal)
        )


def _print_warnings(results: Sequence[Result]) -> None:
    """Print the warnings of audits, each once, because cells of an image often share them."""
    from imagematrix.build.plan.plan import make_item_namer

    name = make_item_namer(result.item for result in results)
    cells: dict[str, list[str]] = {}
    for result in results:
        for text in result.warnings:
            cells.setdefault(text, []).append(name(result.item))
    for text, names in cells.items():
        warn(f"warning: {format_first(names, 'cell')}: {text}")


def _print_failures(results: Sequence[Result], *, overall: BaseException | None) -> None:
    """Print why cells failed, each reason once, in the format of the CI system, if there is one.

    `overall` is the error of the build as a whole; the caller prints it last.
    """
    from imagematrix.build.executor.logs import shorten_log, summarize_error
    from imagematrix.build.executor.result import BuildStatus
    from imagematrix.build.plan.plan import make_item_namer
    from imagematrix.cli.shared import ci
    from imagematrix.cli.shared.message_commands import repeat_options
    from imagematrix.common.text import make_headline

    name = make_item_namer(result.item for result in results)
    system = ci.find_ci_system()
    groups: dict[tuple[str, str | None], list[tuple[Result, ImagematrixError]]] = {}
    for result in results:
        error = result.error
        if result.status is BuildStatus.FAILED and error is not None and error is not overall:
            groups.setdefault((summarize_error(str(error)), error.remedy), []).append((result, error))
    for group in groups.values():
        first, error = group[0]
        names = shorten_words([name(result.item) for result, _ in group], SHOWN)
        if system:
            text = "\n".join(
                filter(None, (shorten_log(first.log, str(error)), repeat_options(error.remedy or "")))
            )
            print_info_raw(ci.format_failure(system, names, make_headline(str(error)), text))
            continue
        print_info("")
        print_info(f"{names} (log: {first.log})" if first.log else names)
        print_error(error)
