"""Options that the commands for Kubernetes share, and their values."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.shared.inputs import find_catalog, require_image
from imagematrix.common.suggestions import require_known
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.integrations.kubernetes.nodes.classes import Classes

Nodes = Annotated[
    Path,
    typer.Option(
        "--nodes", metavar="NODES.json", help="The nodes, from `kubectl get nodes -o json`; - for stdin."
    ),
]
NodesAndPods = Annotated[
    Path,
    typer.Option(
        "--nodes",
        metavar="NODES.json",
        help="The nodes, or nodes and pods, from `kubectl get nodes,pods -A -o json`; - for stdin.",
    ),
]
Pods = Annotated[
    Path | None,
    typer.Option(
        "--pods", metavar="PODS.json", help="The pods, from `kubectl get pods -A -o json`; - for stdin."
    ),
]
OnUnknown = Annotated[
    str,
    typer.Option(
        "--on-unknown",
        metavar="{default|deny}",
        help="Leave a pod whose image is undecided as it is, or refuse it.",
    ),
]
KubeletRoot = Annotated[
    Path | None,
    typer.Option(
        "--kubelet",
        metavar="FOLDER",
        help="The kubelet's --root-dir; default: that of this node's kubelet, or /var/lib/kubelet.",
    ),
]
DevicePlugins = Annotated[
    Path,
    typer.Option(
        "--device-plugins",
        metavar="FOLDER",
        help="Where the kubelet registers device plugins; its --root-dir does not move this.",
    ),
]
ON_UNKNOWN = ("default", "deny")


def require_used_name(used_as: str | None) -> None:
    """Raise UsageError if the option --as is empty."""
    if used_as == "":
        raise UsageError("--as is empty", remedy="give the name that pods use")


def is_denied(on_unknown: str) -> bool:
    """Return whether pods whose image is undecided are refused."""
    require_known(on_unknown, ON_UNKNOWN, "--on-unknown")
    return on_unknown == "deny"


def parse_resource_kinds(by: Sequence[str] | None) -> tuple[str, ...]:
    """Return the kinds of resource names under which a device plugin also offers GPUs."""
    from imagematrix.integrations.kubernetes.plugin.offer import KINDS

    for word in by or ():
        require_known(word, KINDS, "--by")
    return tuple(by or ())


def require_alone(offerer: str, paths: Iterable[str]) -> None:
    """Refuse to offer this node's GPUs if another process does, at one of some sockets."""
    from imagematrix.launcher.kubelet.sockets import find_answering_socket

    if path := find_answering_socket(paths):
        raise UsageError(
            f"{offerer} offers this node's GPUs, at {path}",
            remedy="run `imagematrix kubernetes device-plugin` or `imagematrix kubernetes dra-driver` on a "
            "node, not both",
        )


def load_lists(nodes: Path, pods: Path | None) -> list[tuple[object, str]]:
    """Return the lists that --nodes and --pods name, each with its name for messages."""
    from imagematrix.integrations.kubernetes.nodes.nodes import name_file, read_json

    paths = [nodes, *([pods] if pods else [])]
    if len(paths) > 1 and nodes == pods:
        raise UsageError(
            f"--nodes and --pods are both {nodes}", remedy="give a list of both as --nodes alone"
        )
    return [(read_json(path, sys.stdin.buffer), name_file(path)) for path in paths]


def load_classes(
    nodes: Path,
    image: str | None,
    catalog: str | None,
    *,
    gpus: str | None = None,
    allow_cpu: bool,
    where: Sequence[str] | None,
    drivers: Mapping[str, str] | None = None,
    policy: Path | None = None,
) -> Classes:
    """Return the classes of the nodes in a file, each with its answer from the catalog that options name."""
    from imagematrix.integrations.kubernetes.nodes.classes import classify_nodes
    from imagematrix.integrations.kubernetes.nodes.nodes import load_nodes
    from imagematrix.selection.query import parse_where

    require_image(image, catalog)
    return classify_nodes(
        load_nodes(nodes, sys.stdin.buffer),
        find_catalog(image, catalog, policy),
        gpus=gpus,
        allow_cpu=allow_cpu,
        drivers=drivers,
        where=parse_where(where or ()),
    )


def load_narrowed_catalog(
    image: str, catalog: str | None, where: Sequence[str] | None, policy: Path | None
) -> Catalog:
    """Return the catalog that options name, with only the variants that --where admits."""
    from imagematrix.selection.query import narrow_catalog, parse_where

    return narrow_catalog(find_catalog(image, catalog, policy), parse_where(where or ()))
