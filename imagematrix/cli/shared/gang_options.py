"""`select --gang`: what several hosts run together."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from imagematrix.cli.shared.garbage import without_garbage_collection
from imagematrix.cli.shared.inputs import find_catalog
from imagematrix.cli.shared.output import print_info, print_json, print_text
from imagematrix.images.catalog.sources import require_not_built_on
from imagematrix.selection.fleet.hosts import load_hosts
from imagematrix.selection.gang.gang import NothingFitsAll
from imagematrix.selection.gang.gang_selection import select_gang
from imagematrix.selection.query import parse_where

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class GangRequest:
    """What the hosts in the files `paths` request together; with `alike`, each may get its own variant."""

    paths: Sequence[Path]
    alike: str | None
    gpus: str | None
    where: Sequence[str] | None
    allow_cpu: bool


@without_garbage_collection()  # which would take a third of the time
def print_gang_selection(
    image: str, catalog: str | None, policy: Path | None, request: GangRequest, *, json: bool
) -> None:
    """Print the one reference for the hosts of a request, or with `alike` a line for each host.

    Raises NothingFitsAll; with `json`, the document with the reasons is printed before.
    """
    hosts = load_hosts(*request.paths, stream=sys.stdin.buffer)
    variants = find_catalog(image, catalog, policy)
    try:
        gang = select_gang(
            hosts,
            variants,
            gpus=request.gpus,
            allow_cpu=request.allow_cpu,
            where=parse_where(request.where or ()),
            alike=request.alike,
        )
    except NothingFitsAll as error:
        if json:
            print_json(error.gang.to_json())
        raise
    require_not_built_on(image, catalog, [variant.reference for variant in gang.variants])
    for warning in () if json else gang.warnings:
        print_info(f"imagematrix: {warning.text}")
    if json:
        print_json(gang.to_json())
    elif request.alike is None:
        print_text(gang.variants[0].reference)
    else:
        print_text(*(f"{member.name} {member.pinned}" for member in gang.members))
