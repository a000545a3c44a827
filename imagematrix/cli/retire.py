"""`imagematrix retire`: remove versions that nobody needs from a registry."""

from __future__ import annotations

from typing import Annotated

import typer

from imagematrix.cli.shared.options import Json, Keep, KeptFor, Protect, Yes
from imagematrix.cli.shared.output import (
    escape_text,
    print_info,
    print_json,
    print_lines,
    print_table,
    print_text,
)
from imagematrix.cli.shared.retention_options import (
    flush_stdout,
    make_retention,
    report_removed_count,
    warn_of_unserved,
)
from imagematrix.common.suggestions import suggest_nearest
from imagematrix.common.text import format_count
from imagematrix.common.units import format_megabytes
from imagematrix.errors import UnknownImageError, UsageError

EXAMPLE = "imagematrix retire registry.example.com/ml/training --keep 3"
TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.build.retire.retention import Retention
    from imagematrix.build.retire.retire import Removal, Retirement


def command(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="The image, with its registry.")],
    keep: Keep = None,
    protect: Protect = None,
    hosts: KeptFor = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Show which versions of an image its registry no longer needs; with --yes, remove them.

    A version stays if a tag such as latest names it, or one of the options. Its images, attestations and
    signatures go with it, unless another tag or index names them. The registry's garbage collection then
    frees the space.
    """
    from imagematrix.build.retire.retire import apply_retirement, survey_repository
    from imagematrix.common.image_reference import names_registry, split_version

    name, version = split_version(image)
    if version is not None or not names_registry(name):
        remedy = "such as registry.example.com/ml/training, without a version"
        raise UsageError(f"{image} is not the name of an image in a registry", remedy=remedy)
    retention = make_retention(keep, protect, hosts)
    shown = survey_repository(name, retention)
    _require_valid_retention(shown, retention)
    if json:
        print_json({**shown.to_json(), "dry_run": not yes})
    else:
        _print_retirement(shown)
    warn_of_unserved(shown.unserved)
    size = f"{format_megabytes(shown.size)} of layers and documents"
    versions = format_count(len(shown.retired_versions), "version")
    count = f"{format_count(len(shown.removals), 'manifest')} of {versions}"
    if not yes or not shown.removals:
        print_info(
            f"{name}: {count} would be removed, with {size}"
            if shown.removals
            else f"{name}: nothing to remove"
        )
        return
    flush_stdout()
    removed: list[Removal] = []
    with report_removed_count(removed, format_count(len(shown.removals), "manifest")):
        stuck = apply_retirement(shown, retention, removed.append)
    for removal in stuck:
        print_info(f"{name}@{removal.digest} has no tag any more, but something without a tag names it")
    summary = f"removed {format_count(len(removed), 'manifest')} of {versions}"
    print_info(f"{name}: {summary}; the registry's garbage collection frees {size}")


def _require_valid_retention(shown: Retirement, retention: Retention) -> None:
    """Raise an error if there is no such image or protected version, or if no version serves any host."""
    if not shown.decisions:
        raise UnknownImageError(f"the registry has no version of {shown.image}", remedy="check the name")
    for version in sorted(retention.protect - shown.decisions.keys()):
        remedy = suggest_nearest(version, shown.decisions) or f"it has {', '.join(shown.decisions)}"
        raise UnknownImageError(f"the registry has no {shown.image}:{version} to protect", remedy=remedy)
    if retention.hosts and len(shown.unserved) == len(retention.hosts):
        raise UsageError(f"no version of {shown.image} serves any of these hosts", remedy="check --hosts")


def _print_retirement(shown: Retirement) -> None:
    rows = [
        (escape_text(version), "[green]keep[/]" if fate.is_kept else "[red]remove[/]", escape_text(fate.why))
        for version, fate in shown.decisions.items()
    ]
    print_table(("version", "status", "why"), rows)
    if shown.removals:
        print_lines("")
    for removal in shown.removals:
        for tag in removal.tags or ("",):
            print_text(f"{shown.image}{':' * bool(tag)}{tag}@{removal.digest}")
