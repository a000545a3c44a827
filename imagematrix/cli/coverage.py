"""`imagematrix coverage`: which hosts of a fleet have an image, and which images are unused."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.shared.host_filter import choose_plain_pulls
from imagematrix.cli.shared.inputs import find_catalog, require_image
from imagematrix.cli.shared.options import (
    AllowCpu,
    AtMost,
    CatalogName,
    Drivers,
    Gpus,
    ImageName,
    Json,
    Policy,
    Where,
)
from imagematrix.cli.shared.output import (
    escape_text,
    fold_paragraph,
    format_names,
    print_json,
    print_lines,
    print_table,
    report_write_errors,
)
from imagematrix.common import files
from imagematrix.common.text import format_count
from imagematrix.errors import UsageError
from imagematrix.selection.selection import NothingFits

EXAMPLE = "imagematrix coverage registry.example.com/ml/training:v1 hosts/ --html fleet.html"
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from imagematrix.selection.fleet.coverage import Coverage, LimitedVariants
    from imagematrix.selection.fleet.upgrade import Upgrade

LISTED = 20  # reasons or changes listed before "and N more"

Hosts = Annotated[
    list[Path],
    typer.Argument(
        metavar="[IMAGE[:VERSION]] HOST.json...",
        help="The image, unless --image or --catalog names it; and hosts saved by `probe --json`: files, "
        "folders of files, .ndjson files with one host per line, or - for stdin with one host per line.",
    ),
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write the page of the fleet, as one HTML file.")
]
SizesFile = Annotated[
    Path | None,
    typer.Option("--sizes", metavar="FILE", help="Add sizes to the page, saved by `ls --size --json`."),
]
OutdatedFile = Annotated[
    Path | None,
    typer.Option("--outdated", metavar="FILE", help="Add what is outdated, saved by `outdated --json`."),
]


def command(
    hosts: Hosts,
    image: ImageName = None,
    catalog: CatalogName = None,
    policy: Policy = None,
    gpus: Gpus = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
    driver: Drivers = None,
    at_most: AtMost = None,
    json: Json = False,
    html: Html = None,
    sizes: SizesFile = None,
    outdated: OutdatedFile = None,
) -> None:
    """Show which hosts have an image, which images are unused, and what a driver upgrade would break."""
    from imagematrix.selection.fleet.coverage import compute_coverage, with_limit
    from imagematrix.selection.fleet.hosts import OF_LINES, SUFFIX, load_hosts
    from imagematrix.selection.fleet.upgrade import parse_upgrades
    from imagematrix.selection.query import parse_where

    # As in other commands, the first argument may be the image.
    first, *rest = hosts
    # For overlong names, pathlib raises an error.
    is_hosts = first.suffix in (SUFFIX, *OF_LINES) or str(first) == "-" or os.path.exists(first)  # noqa: PTH110
    if image is None and rest and not is_hosts:
        image, hosts = str(first), rest
    require_image(image, catalog)
    if html is None and (sizes or outdated):
        raise UsageError("--sizes and --outdated add to the page of --html", remedy="add --html FILE")
    drivers = parse_upgrades(driver or ())
    fleet = load_hosts(*hosts, stream=sys.stdin.buffer)
    report = compute_coverage(
        fleet,
        find_catalog(image, catalog, policy),
        gpus=gpus,
        allow_cpu=allow_cpu,
        drivers=drivers,
        where=parse_where(where or ()),
    )
    if at_most is not None:
        report = with_limit(report, at_most, always=choose_plain_pulls(fleet.values(), report.catalog, {}))
    if html is not None:
        from imagematrix.selection.fleet.page import render_page
        from imagematrix.selection.fleet.staleness import load_findings
        from imagematrix.selection.fleet.storage import load_storage

        storage = load_storage(sizes, report.catalog) if sizes else None
        findings = load_findings(outdated) if outdated else None
        with report_write_errors(html):
            page = render_page(report, storage=storage, aged=findings)
            files.write_output(html, page.encode(errors="backslashreplace"))
    if json:
        print_json(report.to_json())
    else:
        _print_coverage(report)
    if not report.complete:
        raise typer.Exit(NothingFits.exit_code)


def _print_coverage(report: Coverage) -> None:
    def shorten(reference: str) -> str:
        return escape_text(report.shorten_reference(reference))

    name = escape_text(f"{report.image}:{report.version}")
    print_lines(f"{name} serves {report.served} of {format_count(report.hosts, 'host')}")
    if report.unserved:
        lacking = report.hosts - report.served
        print_lines(
            "", f"[red]nothing fits {format_count(lacking, 'host')}[/]", *_format_unserved(report, shorten)
        )

    print_lines("")
    print_table(
        ("variant", "hosts", "share", "fits"),
        [
            (shorten(service.reference), str(len(service.hosts)), f"{service.share:.1%}", str(service.fits))
            for service in report.variants
            if service.hosts
        ],
    )
    if report.unused:
        print_lines("", f"[yellow]no host would choose {format_count(len(report.unused), 'variant')}[/]")
        rows = [(shorten(service.reference), str(service.fits)) for service in report.unused]
        print_table(("variant", "fits"), rows)

    # The smallest set of variants that is enough, and the best of a limited number.
    smallest = report.smallest
    if smallest.variants:
        enough = f"{format_count(len(smallest.variants), 'variant')} would be enough for the same hosts"
        if not smallest.exact:
            enough += f"; perhaps fewer, but at least {smallest.least}"
        elif report.worse:
            enough += f", though {format_count(report.worse, 'host')} would get a worse one"
        print_lines("", f"{enough}:", *(f"  {shorten(reference)}" for reference in smallest.variants))
    if report.few:
        _print_limited(report.few, report, shorten)

    for upgrade in report.upgrades:
        _print_upgrade(upgrade, shorten)


def _format_unserved(report: Coverage, shorten: Callable[[str], str]) -> Iterator[str]:
    """Yield the hosts that nothing fits, each group with its reasons, the nearest variant and remedies."""
    for unserved in report.unserved[:LISTED]:
        miss = unserved.miss
        yield from fold_paragraph("  ", format_names(unserved.hosts))
        if not miss.told:
            yield from fold_paragraph("       ", escape_text(miss.why))
            yield from _fold_remedy("         ", miss.shown)
        if miss.nearest:
            yield f"       nearest is {shorten(miss.nearest)}"
        for rule in miss.relevant:
            yield from fold_paragraph("         ", escape_text(f"{rule.rule}: {rule.why}"))
            yield from _fold_remedy("           ", rule.shown)
    if len(report.unserved) > LISTED:
        yield f"  {format_count(len(report.unserved) - LISTED, 'more reason')}; --json has all"


def _fold_remedy(indent: str, fix: str | None) -> list[str]:
    return fold_paragraph(indent, f"-> {escape_text(fix)}") if fix else []


def _print_limited(few: LimitedVariants, report: Coverage, shorten: Callable[[str], str]) -> None:
    from imagematrix.selection.fleet.loss import LOSSES

    chosen = few.chosen
    excluded = f"; [red]{format_count(len(chosen.left_out), 'host')} left out[/]" if chosen.left_out else ""
    proof = "" if chosen.exact else ", perhaps not the best"
    print_lines(
        "",
        f"of at most {format_count(chosen.limit, 'variant')}, these are the best{proof}{excluded}:",
        *(f"  {shorten(reference)}" for reference in chosen.variants),
    )
    if chosen.left_out:
        print_lines(*fold_paragraph("  left out: ", format_names(chosen.left_out)))
    print_lines("")
    print_table(
        ("variants", "served", "worse", *LOSSES.values(), "proven"),
        [
            (
                f"[bold]{choice.limit}[/]" if choice.limit == chosen.limit else str(choice.limit),
                str(report.served - choice.loss.left_out),
                str(choice.worse),
                *(str(getattr(choice.loss, name) or "") for name in LOSSES),
                "yes" if choice.exact else "no",
            )
            for choice in few.by_number
        ],
    )


def _print_upgrade(upgrade: Upgrade, shorten: Callable[[str], str]) -> None:
    lost, changed, gained = (
        sum(len(change.hosts) for change in changes)
        for changes in (upgrade.lost, upgrade.changed, upgrade.gained)
    )
    parts = [
        f"[red]{lost} would lose their image[/]" if lost else "",
        f"{changed} would get another" if changed else "",
        f"{gained} would gain one" if gained else "",
        f"nothing changes for {upgrade.unchanged}" if upgrade.unchanged else "",
    ]
    effects = ", ".join(part for part in parts if part)
    hosts = format_count(upgrade.hosts, "host")
    print_lines("", f"driver {upgrade.old} -> {upgrade.new}: {hosts}{': ' * bool(effects)}{effects}")
    rows = []
    for loss in upgrade.lost:
        fixes = dict.fromkeys([rule.shown for rule in loss.miss.relevant] or [loss.miss.shown])
        remedy = escape_text("; ".join(fix for fix in fixes if fix))
        rows.append((format_names(loss.hosts), shorten(loss.old), f"[red]nothing[/]: {remedy}"))
    rows += [
        (format_names(change.hosts), shorten(change.old) if change.old else "nothing", shorten(change.new))
        for change in (*upgrade.changed, *upgrade.gained)
    ]
    if rows:
        print_table(("hosts", "now", "then"), rows[:LISTED])
    if len(rows) > LISTED:
        print_lines(f"{format_count(len(rows) - LISTED, 'more change')}; --json has all")
