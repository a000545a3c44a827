"""`imagematrix plan`: for each cell what a build would do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.options import File, Json, Only
from imagematrix.cli.output import answer, counted, say, table
from imagematrix.cli.planning import compared
from imagematrix.errors import TagMovedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.build.plan import Item, Plan

__all__ = ["command"]

COLOURS = {
    "build": "green",
    "adopt": "green",
    "up-to-date": "dim",
    "refused": "red",
    "excluded": "dim",
    "infeasible": "yellow",
}


def command(
    file: File = Path("matrix.yaml"),
    only: Only = None,
    push: Annotated[bool, typer.Option("--push", help="Compare with the registry, as build --push.")] = False,
    json: Json = False,
) -> None:
    """Tell for each cell what a build would do: build, adopt, up-to-date, excluded or infeasible, and why."""
    found = compared(file, only, push=push)
    if json:
        answer(found.to_json())
    else:
        _print(found)
    if found.with_status("refused"):
        raise typer.Exit(TagMovedError.exit_code)


def _print(plan: Plan) -> None:
    from rich.markup import escape

    from imagematrix.build.plan import STATUSES

    several = len({item.cell.image.name for item in plan.items}) > 1
    rows = [
        (f"{item.cell.image.name} {item.cell.id}" if several else item.cell.id, item.status, _why(item))
        for item in plan.items
        if item.status != "excluded"
    ]
    # Excluded cells are many and alike: one line for each rule. --json has them one by one.
    dropped = Counter(_why(item) for item in plan.with_status("excluded"))
    rows += [(counted(count, "cell"), "excluded", why) for why, count in dropped.items()]
    table(
        ("cell", "status", "why"),
        [(escape(cell), f"[{COLOURS[status]}]{status}[/]", escape(why)) for cell, status, why in rows],
    )
    counts = ((status, len(plan.with_status(status))) for status in STATUSES)
    say(", ".join(f"{count} {status}" for status, count in counts if count) or "no cell at all")


def _why(item: Item) -> str:
    if item.rule and item.why:
        return f"{item.rule}: {item.why}"
    return item.rule or item.why or ""
