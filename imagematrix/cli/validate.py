"""`imagematrix validate`: check a matrix."""

from __future__ import annotations

from pathlib import Path

from imagematrix.cli.options import File
from imagematrix.cli.output import counted, info
from imagematrix.errors import UsageError

__all__ = ["command"]

SHOWN = 5  # cells that a message lists; further ones are counted


def command(file: File = Path("matrix.yaml")) -> None:
    """Check a matrix: every error with file, line, column and a suggestion."""
    from imagematrix.builder.compiler import unknown_flags
    from imagematrix.matrix.load import load
    from imagematrix.planning.plan import DropStatus, PlanStatus
    from imagematrix.planning.planner import Against, plan

    # A plan without an engine also renders every cell, which finds errors in the templates.
    plan_ = plan(load(file), Against())
    for item in plan_.with_status(PlanStatus.FAILED):
        raise UsageError(f"{file}: {item.cell.id}: {item.why}")
    buildable = plan_.with_status(PlanStatus.BUILD)
    errors = unknown_flags(buildable)
    if errors:
        more = [f"and {counted(len(errors) - SHOWN, 'cell')} more"] if len(errors) > SHOWN else []
        lines = [f"{file}: {error}" for error in errors[:SHOWN]] + more
        raise UsageError("\n".join(lines), remedy=errors[0].remedy)
    dropped = [f"{len(plan_.dropped(status))} {status}" for status in DropStatus]
    info(f"{file}: {', '.join([counted(len(buildable), 'cell') + ' to build', *dropped])}")
