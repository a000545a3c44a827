"""What `plan`, `render` and `build` share: the plan of a matrix, against an engine or without one."""

from __future__ import annotations

from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from imagematrix.build.backend import Backend
    from imagematrix.build.plan import Plan

__all__ = ["planned"]


def planned(file: Path, backend: Backend | None, only: str | None) -> Plan:
    """Return the plan of the matrix in `file`; a bad `--only` is the user's error."""
    from imagematrix.build.plan import plan
    from imagematrix.matrix.conditions import ConditionError
    from imagematrix.matrix.load import load

    try:
        return plan(load(file), backend, expression=only)
    except ConditionError as error:
        raise UsageError(f"--only: {error}") from error
