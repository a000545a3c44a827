"""`imagematrix kubernetes labels`: this node's facts as labels."""

from __future__ import annotations

from typing import Annotated

import typer

from imagematrix.cli.shared.inputs import load_node
from imagematrix.cli.shared.options import HostFile, Json, NvidiaSmi, Root
from imagematrix.cli.shared.output import print_document, print_info, print_json
from imagematrix.common.suggestions import require_known

FORMATS = ("nfd", "kubectl")


def command(
    host: HostFile = None,
    root: Root = None,
    nvidia_smi: NvidiaSmi = None,
    format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="{nfd|kubectl}",
            help="nfd: a feature file of Node Feature Discovery; kubectl: a command that sets the labels.",
        ),
    ] = "nfd",
    node: Annotated[
        str, typer.Option("--node", metavar="NAME", help="The node's name in the kubectl command.")
    ] = "$NODE",
    json: Json = False,
) -> None:
    """Print labels that describe this node to a cluster: CPU flags, driver, GPUs, and the node's class."""
    from imagematrix.integrations.kubernetes.nodes.labels import (
        make_document,
        make_feature_file,
        make_kubectl_command,
        make_labels,
    )

    require_known(format, FORMATS, "format")
    described, _ = load_node(host, root, nvidia_smi, None)
    labels = make_labels(described)
    if json:
        print_json(make_document(labels, described.warnings))
    else:
        print_document(
            f"{make_feature_file(labels) if format == 'nfd' else make_kubectl_command(labels, node)}\n"
        )
    for warning in described.warnings:
        print_info(f"warning: {warning}")
