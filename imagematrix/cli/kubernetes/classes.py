"""`imagematrix kubernetes classes`: the classes of a cluster's nodes, and the image of each class."""

from __future__ import annotations

import typer

from imagematrix.cli.kubernetes.options import Nodes, load_classes
from imagematrix.cli.shared.options import (
    AllowCpu,
    CatalogName,
    Drivers,
    Gpus,
    ImageName,
    Json,
    Policy,
    Where,
)
from imagematrix.cli.shared.output import escape_text, format_names, print_json, print_lines, print_table
from imagematrix.common.text import format_count
from imagematrix.selection.selection import NothingFits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.integrations.kubernetes.nodes.classes import Classes, NodeClass
    from imagematrix.selection.fleet.upgrade import Upgrade


def command(
    nodes: Nodes,
    image: ImageName = None,
    catalog: CatalogName = None,
    policy: Policy = None,
    gpus: Gpus = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
    driver: Drivers = None,
    json: Json = False,
) -> None:
    """Group a cluster's nodes into classes of equal hardware, and show which image each class gets."""
    from imagematrix.selection.fleet.upgrade import parse_upgrades

    classes = load_classes(
        nodes,
        image,
        catalog,
        gpus=gpus,
        allow_cpu=allow_cpu,
        where=where,
        drivers=parse_upgrades(driver or ()),
        policy=policy,
    )
    if json:
        print_json(classes.to_json())
    else:
        _print(classes)
    if not classes.is_complete:
        raise typer.Exit(NothingFits.exit_code)


def _print(classes: Classes) -> None:
    prefix = f"{classes.catalog.image}:{classes.catalog.version}-"
    print_table(
        ("class", "nodes", "image", "why"),
        [
            (
                escape_text(each.name),
                str(len(each.nodes)),
                escape_text(each.variant.reference.removeprefix(prefix))
                if each.variant
                else "[red]nothing[/]",
                "" if each.miss else each.why,
            )
            for each in classes.classes
        ],
    )
    for each in classes.classes:
        lines = list(_remarks(each))
        if lines:
            print_lines("", f"{each.name}: {format_names([node.name for node in each.nodes])}", *lines)
    for upgrade in classes.upgrades:
        print_lines("", *_upgrade(upgrade, prefix))


def _remarks(each: NodeClass) -> Iterator[str]:
    if each.miss:
        yield f"  {escape_text(each.miss.why)}"
        if each.miss.shown:
            yield f"    -> {escape_text(each.miss.shown)}"
    yield from (f"  [yellow]{escape_text(warning)}[/]" for warning in each.warnings)


def _upgrade(upgrade: Upgrade, prefix: str) -> Iterator[str]:
    yield f"driver {upgrade.old} -> {upgrade.new}: {format_count(upgrade.hosts, 'node')}"
    for loss in upgrade.lost:
        yield f"  [red]nothing[/] for {format_names(loss.hosts)}: {escape_text(loss.miss.why)}"
    for change in (*upgrade.changed, *upgrade.gained):
        yield f"  {escape_text(change.new.removeprefix(prefix))} for {format_names(change.hosts)}"
    if upgrade.unchanged:
        yield f"  nothing changes for {format_count(upgrade.unchanged, 'node')}"
