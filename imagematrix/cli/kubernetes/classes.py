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
    from imagematrix.integrations.kubernetes.nodes.classes import Classes


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
        _print_classes(classes)
    if not classes.is_complete:
        raise typer.Exit(NothingFits.exit_code)


def _print_classes(classes: Classes) -> None:
    prefix = f"{classes.catalog.image}:{classes.catalog.version}-"
    print_table(
        ("class", "nodes", "image", "why"),
        [
            (
                escape_text(node_class.name),
                str(len(node_class.nodes)),
                escape_text(node_class.variant.reference.removeprefix(prefix))
                if node_class.variant
                else "[red]nothing[/]",
                "" if node_class.miss else node_class.why,
            )
            for node_class in classes.classes
        ],
    )
    for node_class in classes.classes:
        lines = [f"  [yellow]{escape_text(warning)}[/]" for warning in node_class.warnings]
        if node_class.miss:
            remedy = node_class.miss.shown
            fix = [f"    -> {escape_text(remedy)}"] if remedy else []
            lines = [f"  {escape_text(node_class.miss.why)}", *fix, *lines]
        if lines:
            names = format_names([node.name for node in node_class.nodes])
            print_lines("", f"{node_class.name}: {names}", *lines)
    for upgrade in classes.upgrades:
        lines = [f"driver {upgrade.old} -> {upgrade.new}: {format_count(upgrade.hosts, 'node')}"]
        for loss in upgrade.lost:
            lines.append(f"  [red]nothing[/] for {format_names(loss.hosts)}: {escape_text(loss.miss.why)}")
        for change in (*upgrade.changed, *upgrade.gained):
            image = escape_text(change.new.removeprefix(prefix))
            lines.append(f"  {image} for {format_names(change.hosts)}")
        if upgrade.unchanged:
            lines.append(f"  nothing changes for {format_count(upgrade.unchanged, 'node')}")
        print_lines("", *lines)
