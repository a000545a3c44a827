"""`imagematrix prune`: remove images that this node no longer needs from its engine, or from a store."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

import typer

from imagematrix.cli.shared import completion
from imagematrix.cli.shared.options import Json, Keep, KeptFor, Protect, Yes
from imagematrix.cli.shared.output import escape_text, print_info, print_json, print_table
from imagematrix.cli.shared.retention_options import (
    flush_stdout,
    make_retention,
    report_removed_count,
    warn_of_unserved,
)
from imagematrix.common.text import format_count
from imagematrix.common.units import format_megabytes
from imagematrix.errors import UsageError

EXAMPLE = "imagematrix prune --keep 2"
TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.build.retire.prune import PruneCandidate, Pruning

OPTIONS = "--keep N, --protect VERSION, --hosts HOSTS or --newer AGE"


def command(
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="IMAGE...", help="Consider these images only.", autocompletion=completion.complete_names
        ),
    ] = None,
    keep: Keep = None,
    protect: Protect = None,
    hosts: KeptFor = None,
    newer: Annotated[
        str | None,
        typer.Option(
            "--newer", metavar="AGE", help="Keep images that got their name in this time, such as 12h or 7d."
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store", metavar="STORE", help="Remove from this folder, which `pull --to` fills, instead."
        ),
    ] = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Show which variants this node's engine, or a store, no longer needs; with --yes, remove them.

    A variant stays if a container uses it, running or not, if somebody gave it another name, or if one of the
    options names it. Images without labels of imagematrix are never removed. In a store, containers of all
    nodes count.
    """
    from functools import partial

    from imagematrix.build.retire import prune, prune_store
    from imagematrix.common.image_reference import shorten_name, split_version
    from imagematrix.common.units import parse_duration
    from imagematrix.images.local_store.folder import ImageStore

    newer_s = None if newer is None else parse_duration(newer)
    if newer is not None and newer_s is None:
        raise UsageError(f"--newer: {newer!r} is not an age", remedy="such as 90m, 12h, 7d or 2w")
    names = [split_version(name) for name in images or ()]
    for name, version in names:
        if version is not None:
            raise UsageError(f"{name}:{version} has a version", remedy=f"pass {name}")
    retention = make_retention(keep, protect, hosts, newer, names=OPTIONS)
    folder = None if store is None else ImageStore(store)
    survey = partial(
        partial(prune_store.survey_store, folder) if folder else prune.survey_engine,
        retention,
        only=[shorten_name(name) for name, _ in names],
        newer_s=newer_s,
        now=dt.datetime.now(dt.UTC),
    )
    shown = survey()
    if json:
        print_json({**shown.to_json(), "dry_run": not yes})
    else:
        _print_pruning(shown)
    warn_of_unserved(shown.unserved)
    missing = sorted(retention.protect - {image.version for image in shown.images})
    if missing:
        print_info(f"{folder or 'the engine'} has no image of version {', '.join(missing)}")
    count = format_count(len(shown.removals), "image")
    if not yes or not shown.removals:
        print_info(f"{count} would be removed" if shown.removals else "nothing to remove")
        return
    flush_stdout()
    removed: list[PruneCandidate] = []
    with report_removed_count(removed, count):
        remove = partial(prune_store.remove_image, folder) if folder else None
        prune.apply_pruning(shown, survey, removed.append, remove)
    print_info(f"removed {count}")


def _print_pruning(shown: Pruning) -> None:
    rows = [
        (
            escape_text(name),
            "[green]keep[/]" if image.is_kept else "[red]remove[/]",
            format_megabytes(image.size, 0),
            escape_text(image.reasons),
        )
        for image in shown.images
        for name in image.names
    ]
    if rows:
        print_table(("image", "status", "size", "why"), rows)
