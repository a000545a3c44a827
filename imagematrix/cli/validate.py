"""`imagematrix validate`: check a matrix."""

from __future__ import annotations

from pathlib import Path

from imagematrix.cli.options import File
from imagematrix.cli.output import counted, say

__all__ = ["command"]


def command(file: File = Path("matrix.yaml")) -> None:
    """Check a matrix: every error with file, line, column and a suggestion."""
    from imagematrix.build.plan import Against, plan
    from imagematrix.matrix.load import load

    # A plan without an engine also renders every cell, which finds what is wrong in the templates.
    found = plan(load(file), Against())
    say(
        f"{file}: {counted(len(found.with_status('build')), 'cell')} to build, "
        f"{len(found.with_status('excluded'))} excluded, {len(found.with_status('infeasible'))} infeasible"
    )
