"""`plan --why` as text: what was decided about a cell, where its values stand, and what it is built from."""

from __future__ import annotations

import re

from imagematrix.build.plan.comparison import SHOWN
from imagematrix.build.plan.plan import Planned, PlanStatus, get_full_name
from imagematrix.cli.shared.output import escape_text, fold_paragraph, print_lines, print_table
from imagematrix.common.text import shorten_words

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.build.plan.explanation import CellExplanation, Input

DIGEST = re.compile(r"sha256:([0-9a-f]{12})[0-9a-f]{52}")
LONGEST = 60  # characters of a name or a value
LISTED = 20  # changed files
DOUBT = "its labels do not list inputs with the digest that they state: what it was built from is uncertain"


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
        yield "there is no image of this cell"
    if item.difference and len(item.difference.files) > SHOWN:  # the reason has fewer
        yield f"changed files: {shorten_words(item.difference.files, LISTED)}"
    if explanation.doubtful:
        yield DOUBT


def _format_input(component: Input, *, compared: bool) -> tuple[str, ...]:
    """Return the row of an input, with its state if it was `compared`."""
    name, source = _shorten(component.name), escape_text(component.source or "")
    value, before = _shorten(component.value or ""), _shorten(component.before or "")
    if not compared:
        return name, value, source
    if component.value == component.before:
        return name, "[dim]same[/]", value, source
    if component.before is None:
        return name, "[yellow]new[/]", value, source
    if component.value is None:
        return name, "[yellow]gone[/]", before, source
    return name, "[yellow]changed[/]", f"{before} -> {value}", source


def _shorten(text: str) -> str:
    short = DIGEST.sub(r"\1", text)
    return escape_text(short if len(short) <= LONGEST else f"{short[: LONGEST - 1]}…")
