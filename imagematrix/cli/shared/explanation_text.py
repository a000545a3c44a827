"""`plan --why` as text: what was decided about a cell, where its values stand, and what it is built from."""

from __future__ import annotations

import re

from imagematrix.build.plan.comparison import SHOWN
from imagematrix.build.plan.plan import Planned, PlanStatus, get_full_name
from imagematrix.cli.shared.output import escape_text, fold_paragraph, print_lines, print_table
from imagematrix.common.text import shorten_lines, shorten_words
from imagematrix.images.catalog.catalog import CLAIM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.build.plan.explanation import CellExplanation, Input

DIGEST = re.compile(r"sha256:([0-9a-f]{12})[0-9a-f]{52}")
LONGEST = 60  # characters of the name or the value of an input
LONGEST_NEED = 600  # CPU flags are the longest that the matrix promises
MOST_LINES = 40  # of a Dockerfile that are shown
LISTED = 20  # changed files
DOUBT = "its labels do not list inputs with the digest that they state: what it was built from is uncertain"
LAYOUTS = "in an OCI layout, which is audited before it gets its labels"
CLASSIC = "in the engine's classic image store: its labels are claims, and a second build differs"


def print_explanation(explanation: CellExplanation, where: str) -> None:
    """Print what was decided about a cell of the matrix `where`."""
    item = explanation.item
    print_lines(f"{escape_text(get_full_name(item.cell))}: [bold]{item.status}[/]")
    for sentence in _list_sentences(explanation):
        print_lines(*map(escape_text, fold_paragraph("  ", sentence)))
    if explanation.values:
        print_lines("")
        rows = []
        for value in explanation.values:
            replaced = "" if value.used else ", replaced below"
            row = value.name, value.text, f"{where}:{value.line}, {value.part}{replaced}"
            rows.append(tuple(map(escape_text, row)))
        print_table(("axis or property", "value", "from"), rows)
    if explanation.inputs:
        print_lines("")
        compared = explanation.existing is not None
        inputs = [_format_input(component, compared=compared) for component in explanation.inputs]
        print_table(("input", "state", "value", "from") if compared else ("input", "value", "from"), inputs)
    if explanation.lines:
        print_lines("", "lines of the Dockerfile")
        print_lines(*map(escape_text, shorten_lines(explanation.lines, MOST_LINES)))
    if explanation.needs:
        print_lines("", "needs of a node")
    for need in explanation.needs:
        source = "" if need.source == CLAIM else f" ({need.source})"
        text = f"{need.rule}{source}: {_shorten(_format_field([*need.fields.values()]), LONGEST_NEED)}"
        print_lines(*map(escape_text, fold_paragraph("  ", text)))


def _list_sentences(explanation: CellExplanation) -> Iterator[str]:
    """Yield why the cell has its status."""
    item, existing = explanation.item, explanation.existing
    if not isinstance(item, Planned):
        yield ": ".join(filter(None, (item.rule, item.why)))
        return
    if item.why:
        yield item.why
    if explanation.unknown:
        yield f"its inputs are unknown, because the digest of {', '.join(explanation.unknown)} is"
    elif existing:
        has_same = item.status in (PlanStatus.UP_TO_DATE, PlanStatus.ADOPT)
        yield f"{'the same inputs as' if has_same else 'compared with'} {existing}"
    elif item.identity and not item.why:
        yield "no image of this cell is known"
    if item.difference and len(item.difference.files) > SHOWN:  # the reason has fewer
        yield f"changed files: {shorten_words(item.difference.files, LISTED)}"
    if explanation.doubtful:
        yield DOUBT
    method = explanation.method
    if method and method.error:
        yield f"it cannot be built here: {method.error}"
    elif method:
        foreign = item.execution.describe_foreign() if item.execution else None
        where = f"{item.cell.platform} ({foreign})" if foreign else item.cell.platform
        yield f"to be built for {where}, {LAYOUTS if method.layouts else CLASSIC}"


def _format_input(component: Input, *, compared: bool) -> tuple[str, ...]:
    """Return the row of an input, with its state if it was `compared`."""
    words = component.name, component.value or "", component.before or ""
    name, value, before = (escape_text(_shorten(DIGEST.sub(r"\1", word), LONGEST)) for word in words)
    source = escape_text(component.source or "")
    if not compared:
        return name, value, source
    if component.value == component.before:
        return name, "[dim]same[/]", value, source
    if component.before is None:
        return name, "[yellow]new[/]", value, source
    if component.value is None:
        return name, "[yellow]gone[/]", before, source
    return name, "[yellow]changed[/]", f"{before} -> {value}", source


def _format_field(value: object) -> str:
    """Return a field of a catalog entry as words."""
    if isinstance(value, dict):
        return _format_field([*value.values()])
    return " ".join(map(_format_field, value)) if isinstance(value, list) else str(value)


def _shorten(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
