"""`imagematrix validate`: check a matrix."""

from __future__ import annotations

from pathlib import Path

from imagematrix.cli.shared.options import AllowContext, File
from imagematrix.cli.shared.output import print_info, warn
from imagematrix.common.text import format_count, format_first, shorten_lines
from imagematrix.errors import UsageError

SHOWN = 5  # different failures that a message lists; further ones are counted


def command(file: File = Path("matrix.yaml"), allow_context: AllowContext = None) -> None:
    """Check a matrix: every error with file, line, column and a suggestion."""
    from imagematrix.build.dockerfile.template_error import TemplateError, merge_errors
    from imagematrix.build.matrix.load import load_matrix
    from imagematrix.build.plan.plan import (
        DropStatus,
        PlanContext,
        PlanStatus,
        get_full_name,
        make_item_namer,
    )
    from imagematrix.build.plan.planner import plan

    # A plan without an engine also renders every cell, which finds errors in the templates.
    matrix = load_matrix(file, contexts=allow_context or ())
    plan_ = plan(matrix, PlanContext())
    failed = plan_.with_status(PlanStatus.FAILED)
    faulty = {
        get_full_name(item.cell): item.error for item in failed if isinstance(item.error, TemplateError)
    }
    if faulty:
        raise merge_errors(faulty)
    if failed:
        name = make_item_namer(failed)
        cells: dict[str, list[str]] = {}  # by the reason
        for item in failed:
            cells.setdefault(item.why or "", []).append(name(item))
        lines = [f"{file}: {format_first(names, 'cell')}: {why}" for why, names in cells.items()]
        remedies = [item.error.remedy for item in failed if item.error and item.error.remedy]
        raise UsageError(*shorten_lines(lines, SHOWN, indent=""), remedy=next(iter(remedies), None))
    for problem in matrix.warnings:
        warn(f"{file}:{problem.mark.line}:{problem.mark.column}: {problem.message}", problem.remedy)
    buildable = plan_.with_status(PlanStatus.BUILD)
    dropped = [
        f"{len(plan_.list_dropped(status))} {status}"
        for status in (DropStatus.EXCLUDED, DropStatus.INFEASIBLE)
    ]
    print_info(f"{file}: {', '.join([format_count(len(buildable), 'cell') + ' to build', *dropped])}")
