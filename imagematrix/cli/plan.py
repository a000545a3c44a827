"""`imagematrix plan`: what a build would do, cell by cell."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.build.plan.plan import Dropped, DropStatus, PlanStatus
from imagematrix.cli.shared import completion
from imagematrix.cli.shared.build_session import (
    find_build_method,
    make_shard_filter,
    plan_and_compare,
    warn_of_lost,
    warn_of_marches,
    warn_of_missing_emulators,
    warn_of_nvml,
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
from imagematrix.cli.shared.output import escape_text, print_error, print_info, print_json, print_table
from imagematrix.common.text import format_count
from imagematrix.errors import EngineError, TagMovedError, UsageError

EXAMPLE = "imagematrix plan --only 'cuda>=12.4'"
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.build.matrix.matrix import Matrix
    from imagematrix.build.plan.plan import Plan, Planned

COLOURS = {
    PlanStatus.BUILD: "green",
    PlanStatus.ADOPT: "green",
    PlanStatus.UP_TO_DATE: "dim",
    PlanStatus.REFUSED: "red",
    PlanStatus.FAILED: "red",
    DropStatus.EXCLUDED: "dim",
    DropStatus.INFEASIBLE: "yellow",
    DropStatus.UNNEEDED: "dim",
}


def command(
    file: File = Path("matrix.yaml"),
    only: Only = None,
    platform: Platforms = None,
    hosts: ForHosts = None,
    at_most: AtMost = None,
    push: Annotated[
        bool, typer.Option("--push", help="Compare with the registry, as `build --push` does.")
    ] = False,
    builder: Builders = None,
    shard: ShardOf = None,
    durations: DurationsFiles = None,
    build_arg: BuildArgs = None,
    proxy: Proxy = False,
    allow_context: AllowContext = None,
    why: Annotated[
        str | None,
        typer.Option(
            "--why",
            metavar="CELL",
            help="Show what was decided about one cell, and from what: its name, its tag, or values such as "
            "'cuda=12.4,march=znver4'.",
            autocompletion=completion.complete_only,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show what a build would do for each cell: build, adopt, up-to-date, excluded or infeasible, and why."""
    from imagematrix.build.plan.build_inputs import parse_build_inputs

    matrix = None
    if why is not None:
        if only or platform or shard:
            raise UsageError("--why names one cell", remedy="leave out --only, --platform and --shard")
        matrix, only = _find_cell(file, allow_context or (), why)
    narrow = make_shard_filter(shard, durations)
    inputs = parse_build_inputs(args=build_arg or (), proxy=proxy)
    needs = load_host_needs(hosts, at_most)
    plan = narrow(
        plan_and_compare(
            file,
            only,
            platforms=platform or (),
            push=push,
            inputs=inputs,
            contexts=allow_context or (),
            needs=needs,
            builders=builder or (),
        )
    )
    if matrix:
        _print_explanation(matrix, plan, json=json)
    elif json:
        print_json(plan.to_json())
    else:
        _print_plan(plan, names_builders=len(builder or ()) > 1)
    warn_of_lost(plan)
    warn_of_nvml(plan)
    warn_of_marches(plan)
    warn_of_missing_emulators(plan)
    unserved = needs.find_unserved_error() if needs else None
    if unserved:
        print_error(unserved)
    failed = plan.with_status(PlanStatus.FAILED)
    errors = [item.error for item in failed if item.error]
    for remedy in dict.fromkeys(error.remedy for error in errors if error.remedy):
        print_info(f"  {remedy}")
    if plan.with_status(PlanStatus.REFUSED):
        raise typer.Exit(TagMovedError.exit_code)
    if failed:
        is_unreachable = any(isinstance(error, EngineError) for error in errors)
        raise typer.Exit(EngineError.exit_code if is_unreachable else UsageError.exit_code)
    if unserved:
        raise typer.Exit(unserved.exit_code)


def _find_cell(file: Path, contexts: Sequence[Path], name: str) -> tuple[Matrix, str]:
    """Return the matrix, and the conditions for the cell that `name` names; raise UsageError."""
    from imagematrix.build.matrix.load import load_matrix
    from imagematrix.build.plan.cell_name import find_cell, format_condition

    matrix = load_matrix(file, contexts=contexts)
    return matrix, format_condition(find_cell(matrix, name))


def _print_explanation(matrix: Matrix, plan: Plan, *, json: bool) -> None:
    """Print what a plan of only one cell decided about it."""
    from imagematrix.build.executor.logs import get_log_path, load_dockerfile
    from imagematrix.build.plan.context import STATE
    from imagematrix.build.plan.explanation import explain_cell
    from imagematrix.cli.shared.explanation_text import print_explanation

    item = plan.items[0]
    image = item.cell.image
    log = get_log_path(matrix.path.parent / STATE / "logs", image.name, image.version, item.cell.id)
    explanation = explain_cell(matrix, plan, item, load_dockerfile(log))
    if item.status is PlanStatus.BUILD:
        explanation = replace(explanation, method=find_build_method())
    if json:
        print_json(explanation.to_json())
    else:
        print_explanation(explanation, str(matrix.path))


def _print_plan(plan: Plan, *, names_builders: bool) -> None:
    from imagematrix.build.plan.plan import make_item_namer

    name = make_item_namer(plan.items)
    rows: list[tuple[str, PlanStatus | DropStatus, str]] = [
        (name(item), item.status, _describe_reason(item, names_builder=names_builders))
        for item in plan.items
        if item.status not in (DropStatus.EXCLUDED, DropStatus.UNNEEDED, PlanStatus.OTHER_SHARD)
    ]
    # Excluded cells are many and alike: one line for each rule. --json lists each cell.
    excluded = Counter(map(_describe_reason, plan.list_dropped(DropStatus.EXCLUDED)))
    rows += [(format_count(count, "cell"), DropStatus.EXCLUDED, why) for why, count in excluded.items()]
    unneeded = len(plan.list_dropped(DropStatus.UNNEEDED))
    if unneeded:
        rows.append((format_count(unneeded, "cell"), DropStatus.UNNEEDED, "no host would choose them"))
    print_table(
        ("cell", "status", "why"),
        [
            (escape_text(cell), f"[{COLOURS[status]}]{status}[/]", escape_text(why))
            for cell, status, why in rows
        ],
    )
    counts = Counter[PlanStatus | DropStatus](item.status for item in plan.items)
    statuses = (*PlanStatus, *DropStatus)
    print_info(", ".join(f"{counts[status]} {status}" for status in statuses if counts[status]) or "no cells")


def _describe_reason(item: Planned | Dropped, *, names_builder: bool = False) -> str:
    if isinstance(item, Dropped):
        return ": ".join(filter(None, (item.rule, item.why)))
    how = item.execution.describe_foreign(names_builder=names_builder) if item.execution else None
    return "; ".join(filter(None, (item.why, how)))
