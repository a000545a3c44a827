"""`imagematrix plan`: for each cell what a build would do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.options import BuildArgs, DurationsFiles, File, Json, Only, Proxy, ShardOf
from imagematrix.cli.output import answer, counted, say, table
from imagematrix.cli.planning import compared, sharding
from imagematrix.errors import TagMovedError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.planning.plan import Item, Plan

__all__ = ["command"]

COLOURS = {
    "build": "green",
    "adopt": "green",
    "up-to-date": "dim",
    "refused": "red",
    "failed": "red",
    "excluded": "dim",
    "infeasible": "yellow",
}


def command(
    file: File = Path("matrix.yaml"),
    only: Only = None,
    push: Annotated[bool, typer.Option("--push", help="Compare with the registry, as build --push.")] = False,
    shard: ShardOf = None,
    durations: DurationsFiles = None,
    build_arg: BuildArgs = None,
    proxy: Proxy = False,
    json: Json = False,
) -> None:
    """Tell for each cell what a build would do: build, adopt, up-to-date, excluded or infeasible, and why."""
    from imagematrix.planning.given import parse

    narrow = sharding(shard, durations)
    found = narrow(compared(file, only, push=push, given=parse(args=build_arg or (), proxy=proxy)))
    if json:
        answer(found.to_json())
    else:
        _print(found)
    if found.with_status("refused"):
        raise typer.Exit(TagMovedError.exit_code)
    if found.with_status("failed"):
        raise typer.Exit(UsageError.exit_code)


def _print(plan: Plan) -> None:
    from rich.markup import escape

    from imagematrix.planning.naming import naming
    from imagematrix.planning.plan import STATUSES

    name = naming(plan.items)
    rows = [
        (name(item), item.status, _why(item))
        for item in plan.items
        if item.status not in ("excluded", "other-shard")
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
