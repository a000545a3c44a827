"""Labels in the formats of other tools."""

from __future__ import annotations

import shlex

from imagematrix.kubernetes.labels import CLASS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["SCHEMA", "document", "feature_file", "kubectl"]

SCHEMA = "imagematrix.labels/v1"
NODE = "$NODE"  # a variable that the shell must expand


def document(labels: Mapping[str, str], warnings: Sequence[str]) -> dict[str, object]:
    """Return the Labels document."""
    return {
        "schema": SCHEMA,
        "class": labels[CLASS],
        "labels": dict(labels),
        "warnings": list(warnings),
    }


def feature_file(labels: Mapping[str, str]) -> str:
    """Return a feature file for Node Feature Discovery's source `local`, which reads up to 64 kB."""
    return "\n".join(["# by imagematrix kubernetes labels", *(f"{key}={labels[key]}" for key in labels)])


def kubectl(labels: Mapping[str, str], node: str) -> str:
    """Return the command that sets the labels of a node."""
    name = f'"{NODE}"' if node == NODE else shlex.quote(node)
    return " ".join([f"kubectl label --overwrite node {name}", *(f"{key}={labels[key]}" for key in labels)])
