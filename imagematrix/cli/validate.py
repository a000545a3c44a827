"""`imagematrix validate`: check a matrix."""

from __future__ import annotations

from pathlib import Path

from imagematrix.cli.shared.options import AllowContext, File
from imagematrix.cli.shared.output import print_info
from imagematrix.common.text import format_count, format_first, shorten_lines
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.build.plan.plan import Planned

SHOWN = 5  # different failures that a message lists; further ones are counted


def command(file: File = Path("matrix.yaml"), allow_context: AllowContext = None) -> None:
    """Check a matrix: every error with file, line, column and a suggestion."""
    from imagematrix.build.matrix.load import load_matrix
    from imagematrix.build.plan.plan import DropStatus, PlanStatus
    from imagematrix.build.plan.planner import PlanContext, plan

    # A plan without an engine also renders every cell, which finds errors in the templates.
    plan_ = plan(load_matrix(file, contexts=allow_context or ()), PlanContext())
    failed = plan_.with_status(PlanStatus.FAILED)
    if failed:
        raise _merge_errors(file, failed)
    buildable = plan_.with_status(PlanStatus.BUILD)
    dropped = [
        f"{len(plan_.list_dropped(status))} {status}"
        for status in (DropStatus.EXCLUDED, DropStatus.INFEASIBLE)
    ]
    print_info(f"{file}: {', '.join([format_count(len(buildable), 'cell') + ' to build', *dropped])}")


def _merge_errors(file: Path, failed: Sequence[Planned]) -> UsageError:
    """Return one error for cells that failed: faults of their templates first, if they have any."""
    from imagematrix.build.dockerfile.template_error import TemplateError, merge_errors
    from imagematrix.build.plan.plan import get_full_name, make_item_namer

    faulty = {
        get_full_name(item.cell): item.error for item in failed if isinstance(item.error, TemplateError)
    }
    if faulty:
        return merge_errors(faulty)
    name = make_item_namer(failed)
    alike: dict[str, list[str]] = {}
    for item in failed:
        alike.setdefault(item.why or "", []).append(name(item))
    lines = [f"{file}: {format_first(names, 'cell')}: {why}" for why, names in alike.items()]
    remedies = [item.error.remedy for item in failed if item.error and item.error.remedy]
    return UsageError(*shorten_lines(lines, SHOWN, indent=""), remedy=next(iter(remedies), None))
