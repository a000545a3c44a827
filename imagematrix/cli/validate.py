"""`imagematrix validate`: check a matrix."""

from __future__ import annotations

from pathlib import Path

from imagematrix.cli.options import AllowContext, File
from imagematrix.cli.output import info
from imagematrix.errors import UsageError
from imagematrix.text import counted, listed

__all__ = ["command"]

SHOWN = 5  # cells that a message lists; further ones are counted


def command(file: File = Path("matrix.yaml"), allow_context: AllowContext = None) -> None:
    """Check a matrix: every error with file, line, column and a suggestion."""
    from imagematrix.matrix.load import load
    from imagematrix.planning.plan import DropStatus, PlanStatus
    from imagematrix.planning.planner import Against, plan

    # A plan without an engine also renders every cell, which finds errors in the templates.
    plan_ = plan(load(file, contexts=allow_context or ()), Against())
    failed = plan_.with_status(PlanStatus.FAILED)
    if failed:
        lines = [f"{file}: {item.cell.id}: {item.why}" for item in failed]
        remedies = [item.error.remedy for item in failed if item.error and item.error.remedy]
        raise UsageError(*listed(lines, SHOWN, indent=""), remedy=next(iter(remedies), None))
    buildable = plan_.with_status(PlanStatus.BUILD)
    dropped = [
        f"{len(plan_.dropped(status))} {status}" for status in (DropStatus.EXCLUDED, DropStatus.INFEASIBLE)
    ]
    info(f"{file}: {', '.join([counted(len(buildable), 'cell') + ' to build', *dropped])}")
