"""`imagematrix swarm gc`: removes jobs that have ended, and containers that jobs have left on this node."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from imagematrix.cli.shared.options import Json
from imagematrix.cli.shared.output import print_json, print_text


def command(
    older_than: Annotated[
        str,
        typer.Option(
            "--older-than",
            metavar="TIME",
            help="Remove only what ended at least this long ago: 90s, 10m, 2h.",
        ),
    ] = "0s",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    json: Json = False,
) -> None:
    """Remove jobs of `swarm run` that have ended, and the containers that jobs have left on this node.

    Queued and running jobs stay. On a worker, only containers are removed.
    """
    from imagematrix.images.engine import transport
    from imagematrix.integrations.swarm.garbage_collection import collect_garbage
    from imagematrix.launcher.docker.options import parse_seconds

    age = parse_seconds(older_than, "--older-than")
    with closing(transport.open_client()) as client:
        removed = collect_garbage(client, age, dry_run=dry_run)
    if json:
        print_json(removed.to_json())
        return
    for name in removed.services:
        print_text(f"service {name}")
    for name in removed.containers:
        print_text(f"container {name}")
