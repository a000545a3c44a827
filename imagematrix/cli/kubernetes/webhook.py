"""`imagematrix kubernetes webhook`: gives new pods the image of their class."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.kubernetes.options import OnUnknown, denies
from imagematrix.cli.options import AllowCpu, Where
from imagematrix.cli.output import info

__all__ = ["command"]

CLUSTER = "cluster"
REMEDY = "give --nodes NODES.json, from `kubectl get nodes -o json`"


def command(
    catalog: Annotated[
        list[str],
        typer.Option(
            "--catalog", metavar="FILE|REF", help="The version whose name to replace in pods; repeatable."
        ),
    ],
    nodes: Annotated[
        str,
        typer.Option(
            metavar=f"{{NODES.json|{CLUSTER}}}",
            help="The nodes, from a file, or watched by this pod's service account.",
        ),
    ],
    tls_cert: Annotated[Path, typer.Option(metavar="FILE", help="The certificate chain, PEM.")],
    tls_key: Annotated[Path, typer.Option(metavar="FILE", help="The certificate's key, PEM.")],
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS:PORT", help="Listen on this address.")
    ] = "0.0.0.0:8443",
    on_unknown: OnUnknown = "default",
    where: Where = None,
    allow_cpu: AllowCpu = False,
) -> None:
    """Serve admission reviews over TLS: pods get the image of their class by digest, and node affinity to it.

    Nodes, catalogs and the certificate are read again when they change. Until the nodes and all catalogs are
    read, the webhook is not ready and answers 503, so that the failurePolicy of its configuration applies.
    """
    from imagematrix.kubernetes.api import inside
    from imagematrix.kubernetes.webhook.server import WebhookSettings, serve
    from imagematrix.kubernetes.webhook.sources import NodesFile
    from imagematrix.kubernetes.webhook.state import PolicyOptions
    from imagematrix.kubernetes.webhook.watched import WatchedNodes
    from imagematrix.selection.question import parse

    options = PolicyOptions(deny=denies(on_unknown), allow_cpu=allow_cpu, where=parse(where or ()))
    serve(
        WebhookSettings(
            catalogs=tuple(dict.fromkeys(catalog)),
            nodes=WatchedNodes(inside(REMEDY)) if nodes == CLUSTER else NodesFile(Path(nodes)),
            chain=tls_cert,
            key=tls_key,
            listen=listen,
            options=options,
        ),
        note=info,
    )
