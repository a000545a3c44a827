"""Options that the commands of `kubernetes render` share, and what these do with the classes of nodes."""

from __future__ import annotations

from typing import Annotated

import typer

from imagematrix.cli.shared.output import print_document, warn
from imagematrix.common.text import quote_word, shorten_words
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from imagematrix.integrations.kubernetes.client.objects import Manifest
    from imagematrix.integrations.kubernetes.nodes.classes import Classes, NodeClass

SHOWN = 4  # classes that a warning names

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ARGUMENT...", help="Arguments for the image's program."),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--class", metavar="NAME", help="Only for this class; repeatable."),
]
WorkloadName = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="The workload's name; default: the image's.")
]
PullSecret = Annotated[
    str | None,
    typer.Option("--pull-secret", metavar="NAME", help="The Secret with the credentials for registries."),
]


def require_registry(name: str) -> None:
    """Raise UsageError if the name of an image has no registry, from which nodes could pull it."""
    from imagematrix.common.image_reference import names_registry

    if not names_registry(name):
        raise UsageError(
            f"{name} is not in a registry, from which nodes could pull it",
            remedy="give the name of a published version, such as registry.example.com/ml/training:v1",
        )


def print_manifests(documents: Iterable[Manifest]) -> None:
    """Print manifests as YAML."""
    from imagematrix.integrations.kubernetes.client.yaml import dump_yaml

    print_document(dump_yaml(*documents))


def make_default_name(grouped: Classes) -> str:
    """Return the last part of the image's name as the name of a workload."""
    return grouped.catalog.image.rpartition("/")[2].replace("_", "-").replace(".", "-")[:63].strip("-")


def warn_of_omitted(grouped: Classes, classes: Sequence[NodeClass]) -> None:
    """Warn of those of a cluster's classes and nodes that get no pods, and of images without a digest."""
    from imagematrix.integrations.kubernetes.workloads.placement import RELABEL

    for node_class in classes:
        if node_class.miss:
            continue
        if len(node_class.placeable_nodes) < len(node_class.nodes):
            names = ", ".join(
                node.name for node in node_class.nodes if node not in node_class.placeable_nodes
            )
            warn(
                f"no pods of the class {node_class.name} for nodes with another class label: {names}", RELABEL
            )
        elif node_class.variant and node_class.variant.digest is None:
            warn(
                f"{node_class.variant.reference}: the catalog has no digest",
                "use the catalog of a published version",
            )
    missing = [(node_class.name, node_class.miss) for node_class in classes if node_class.miss]
    if len(missing) == 1:
        ((name, miss),) = missing
        warn(f"nothing fits the class {name}: {miss.why}", miss.shown)
    elif missing:
        image = f"{grouped.catalog.image}:{grouped.catalog.version}"
        warn(
            f"nothing fits {len(missing)} of {len(classes)} classes: "
            f"{shorten_words([name for name, _ in missing], SHOWN)}",
            f"`imagematrix kubernetes classes --image {quote_word(image)} --nodes FILE` says why",
        )
