"""`imagematrix kubernetes classes`: the classes of a cluster's nodes, and what each gets."""

from __future__ import annotations

import sys

import typer

from imagematrix.cli.kubernetes.options import Drivers, ImageName, Nodes, cluster
from imagematrix.cli.options import AllowCpu, CatalogName, Gpus, Json, Where
from imagematrix.cli.output import console, counted, print_json, table
from imagematrix.selection.selection import NothingFits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.fleet.upgrade import Upgrade
    from imagematrix.kubernetes.classes import Class, Classes

__all__ = ["command"]

NAMED = 4  # nodes that are named before how many more there are


def command(
    nodes: Nodes,
    image: ImageName = None,
    catalog: CatalogName = None,
    gpus: Gpus = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
    driver: Drivers = None,
    json: Json = False,
) -> None:
    """Group a cluster's nodes by what selection can tell apart, and show which image each class gets."""
    from imagematrix.fleet.upgrade import parse

    found = cluster(
        nodes, image, catalog, gpus=gpus, allow_cpu=allow_cpu, where=where, drivers=parse(driver or ())
    )
    if json:
        print_json(found.to_json())
    else:
        _print(found)
    if not found.complete:
        raise typer.Exit(NothingFits.exit_code)


def _print(found: Classes) -> None:
    prefix = f"{found.catalog.image}:{found.catalog.version}-"
    table(
        ("class", "nodes", "image", "why"),
        [
            (
                _safe(each.name),
                str(len(each.nodes)),
                _safe(each.variant.reference.removeprefix(prefix)) if each.variant else "[red]nothing[/]",
                "" if each.miss else each.why,
            )
            for each in found.classes
        ],
    )
    for each in found.classes:
        lines = list(_remarks(each))
        if lines:
            _lines("", f"{each.name}: {_names([node.name for node in each.nodes])}", *lines)
    for upgrade in found.upgrades:
        _lines("", *_upgrade(upgrade, prefix))


def _remarks(each: Class) -> Iterator[str]:
    if each.miss:
        yield f"  {_safe(each.miss.why)}"
        if each.miss.fix:
            yield f"    -> {_safe(each.miss.fix)}"
    yield from (f"  [yellow]{_safe(warning)}[/]" for warning in each.warnings)


def _upgrade(upgrade: Upgrade, prefix: str) -> Iterator[str]:
    yield f"driver {upgrade.old} -> {upgrade.new}: {counted(upgrade.hosts, 'node')}"
    for loss in upgrade.lost:
        yield f"  [red]nothing[/] for {_names(loss.hosts)}: {_safe(loss.miss.why)}"
    for change in (*upgrade.changed, *upgrade.gained):
        yield f"  {_safe(change.new.removeprefix(prefix))} for {_names(change.hosts)}"
    if upgrade.unchanged:
        yield f"  nothing changes for {counted(upgrade.unchanged, 'node')}"


def _names(nodes: list[str] | tuple[str, ...]) -> str:
    more = [f"{len(nodes) - NAMED} more"] if len(nodes) > NAMED else []
    return _safe(", ".join([*nodes[:NAMED], *more]))


def _lines(*lines: str) -> None:
    console(sys.stdout).print("\n".join(lines), soft_wrap=True)


def _safe(text: str) -> str:
    """Return text of others without markup of rich; the console replaces what terminals act on."""
    from rich.markup import escape

    return escape(text)
