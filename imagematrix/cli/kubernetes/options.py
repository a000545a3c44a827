"""Options that the commands for Kubernetes share, and their values."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.choosing import catalog_of, require_image
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from imagematrix.kubernetes.classes import Classes

__all__ = ["Nodes", "NodesFile", "OnUnknown", "cluster", "denies", "kinds"]

HELP = "The nodes, from `kubectl get nodes -o json`; - for stdin."
Nodes = Annotated[Path, typer.Argument(metavar="NODES.json", help=HELP)]
NodesFile = Annotated[Path | None, typer.Option("--nodes", metavar="NODES.json", help=HELP)]
OnUnknown = Annotated[
    str,
    typer.Option(
        "--on-unknown",
        metavar="{default|deny}",
        help="Leave a pod whose image is undecided as it is, or refuse it.",
    ),
]
ON_UNKNOWN = ("default", "deny")


def denies(on_unknown: str) -> bool:
    """Return whether pods whose image is undecided are refused."""
    if on_unknown not in ON_UNKNOWN:
        raise UsageError(f"invalid --on-unknown: {on_unknown!r}", remedy=f"one of {', '.join(ON_UNKNOWN)}")
    return on_unknown == "deny"


def kinds(by: Sequence[str] | None) -> tuple[str, ...]:
    """Return the kinds of resource names under which a device plugin also offers GPUs."""
    from imagematrix.kubernetes.plugin.offer import KINDS

    for word in by or ():
        if word not in KINDS:
            raise UsageError(f"invalid --by: {word!r}", remedy=f"one of {', '.join(KINDS)}")
    return tuple(by or ())


def cluster(
    nodes: Path,
    image: str | None,
    catalog: str | None,
    *,
    gpus: str | None,
    allow_cpu: bool,
    where: Sequence[str] | None,
    drivers: Mapping[str, str] | None = None,
) -> Classes:
    """Return the classes of the nodes in a file, each with its answer from the catalog that options name."""
    from imagematrix.kubernetes.classes import classes
    from imagematrix.kubernetes.nodes import load
    from imagematrix.selection.question import parse

    require_image(image, catalog)
    return classes(
        load(nodes, sys.stdin.buffer),
        catalog_of(image, catalog),
        gpus=gpus,
        allow_cpu=allow_cpu,
        drivers=drivers,
        where=parse(where or ()),
    )
