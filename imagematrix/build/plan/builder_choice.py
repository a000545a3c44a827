"""How the builds of a plan's cells would run on their builders, and which of them cannot."""

from __future__ import annotations

from dataclasses import replace

from imagematrix.build.dockerfile.dockerfile import list_run_platforms
from imagematrix.build.dockerfile.platforms import BUILDER, FLAG, TARGET
from imagematrix.build.plan.execution import (
    BuilderPlatforms,
    Execution,
    ExecutionKind,
    describe_missing,
    suggest_emulator,
)
from imagematrix.build.plan.flags import STAGE
from imagematrix.build.plan.plan import Plan, Planned, PlanStatus
from imagematrix.errors import BuildError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def with_executions(plan: Plan, builders: Sequence[BuilderPlatforms]) -> Plan:
    """Return `plan` with how the builds of its cells would run on `builders`, if there are any."""
    if not builders:
        return plan
    items = tuple(
        replace(item, execution=find_execution(item, builders))
        if isinstance(item, Planned) and item.status is PlanStatus.BUILD
        else item
        for item in plan.items
    )
    return replace(plan, items=items)


def find_execution(item: Planned, builders: Sequence[BuilderPlatforms]) -> Execution:
    """Return how the build of a cell would run on `builders`, of which there is at least one.

    buildx uses the machine of a builder that suits a cell best. But any of several builders may get the cell,
    so that the one that suits it least counts.
    """
    target = item.cell.platform
    run = frozenset([TARGET])  # of a Dockerfile without other platforms, which may run programs
    if FLAG in item.dockerfile or any(builder.native != target for builder in builders):
        # The command line may give build arguments other values.
        arguments = dict.fromkeys(name for name, _ in item.cell.image.build_args)
        run = list_run_platforms(item.dockerfile, [STAGE] if "march" in item.cell.axes else (), arguments)
    by_builder: dict[str, list[Execution]] = {}
    for builder in builders:
        by_builder.setdefault(builder.name, []).append(_execute(target, run, builder))
    return max((min(executions, key=_rank) for executions in by_builder.values()), key=_rank)


def _rank(execution: Execution) -> tuple[bool, bool, int]:
    """Return how little an execution suits a cell."""
    kind = list(ExecutionKind).index(execution.kind)
    return bool(execution.missing), bool(execution.doubtful), kind


def _execute(target: str, run: frozenset[str], builder: BuilderPlatforms) -> Execution:
    names = {TARGET: target, BUILDER: builder.native}
    platforms = {names.get(platform, platform) for platform in run}
    unknown = {platform for platform in platforms if "$" in platform}
    foreign = platforms - unknown - {builder.native}
    if foreign:
        kind = ExecutionKind.EMULATED
    else:
        kind = ExecutionKind.NATIVE if target == builder.native else ExecutionKind.CROSS
    unlisted = foreign - builder.emulated
    missing, doubtful = (set(), unlisted | unknown) if builder.may_emulate_more else (unlisted, unknown)
    return Execution(
        kind=kind,
        builder=builder.name,
        native=builder.native,
        missing=tuple(sorted(missing)),
        doubtful=tuple(sorted(doubtful)),
    )


def fail_missing(plan: Plan) -> Plan:
    """Return `plan` with the cells failed whose builds cannot run, so that none of them starts."""
    items = tuple(
        _fail(item, item.execution)
        if isinstance(item, Planned) and item.execution and item.execution.missing
        else item
        for item in plan.items
    )
    return replace(plan, items=items)


def _fail(item: Planned, execution: Execution) -> Planned:
    error = BuildError(describe_missing(execution), remedy=suggest_emulator(execution.missing))
    return replace(item, status=PlanStatus.FAILED, why=str(error), error=error)
