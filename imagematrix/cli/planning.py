"""What the commands that plan share: the plan of a matrix, with an engine or without, whole or a shard."""

from __future__ import annotations

from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from imagematrix.build.backend import Backend
    from imagematrix.build.plan import Plan

__all__ = ["planned", "sharding"]


def planned(file: Path, backend: Backend | None, only: str | None) -> Plan:
    """Return the plan of the matrix in `file`; a bad `--only` is the user's error."""
    from imagematrix.build.plan import plan
    from imagematrix.matrix.conditions import ConditionError
    from imagematrix.matrix.load import load

    try:
        return plan(load(file), backend, expression=only)
    except ConditionError as error:
        raise UsageError(f"--only: {error}") from error


def sharding(shard: str | None, durations: Sequence[Path] | None) -> Callable[[Plan], Plan]:
    """Return what narrows a plan down to `--shard`; what is wrong with the options is said before a plan."""
    if shard is None:
        if durations:
            raise UsageError("--durations balances shards: it goes with --shard I/N")
        return lambda plan: plan
    from imagematrix.build import outcome
    from imagematrix.build.shard import Shard, narrowed, recorded

    part = Shard.parse(shard)
    known = recorded(map(outcome.load, durations or ()))
    return lambda plan: narrowed(plan, part, known)
