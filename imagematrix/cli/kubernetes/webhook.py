"""`imagematrix kubernetes webhook`: gives new pods the image of their class."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.kubernetes.options import OnUnknown, is_denied
from imagematrix.cli.shared.options import AllowCpu, Health, Policy, Where
from imagematrix.cli.shared.output import print_info
from imagematrix.errors import UsageError

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
    health: Health = None,
    on_unknown: OnUnknown = "default",
    where: Where = None,
    allow_cpu: AllowCpu = False,
    policy: Policy = None,
    events: Annotated[
        str | None,
        typer.Option(
            metavar="LEASE",
            help="Write Events about pending pods; of several webhooks, the one that holds this Lease does.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="NAMESPACE",
            help="A namespace whose pods get no Events, because its configuration leaves it out; repeatable.",
        ),
    ] = None,
) -> None:
    """Serve admission reviews over TLS: pods get the image of their class by digest, and node affinity to it.

    Nodes, catalogs and the certificate are read again when they change. Until the nodes and all catalogs are
    read, the webhook is not ready and answers 503, so that the failurePolicy of its configuration applies. If
    images cannot be chosen from one catalog, its last decisions stay in use; without any, its name is
    undecided.

    With --events, a pod that uses one of the versions and is pending for 10 seconds gets an Event. Its reason
    is NoImageFits, ImageUndecided (the nodes on which the pod may run need different images), NoClassMatches
    (its node selector and affinity match no class), NotAdmitted (it was created while nothing decided),
    ImageOutdated (no class gets its image any more) or NoNodeFits (by labels, taints or GPUs). When the
    replica that holds the Lease has died, another one takes over after 30 seconds.
    """
    from imagematrix.integrations.kubernetes.client.api import find_cluster_api, read_namespace
    from imagematrix.integrations.kubernetes.client.objects import DNS_LABEL
    from imagematrix.integrations.kubernetes.webhook.events import Events
    from imagematrix.integrations.kubernetes.webhook.lease import Leadership
    from imagematrix.integrations.kubernetes.webhook.node_watch import WatchedNodes
    from imagematrix.integrations.kubernetes.webhook.server import WebhookSettings, serve
    from imagematrix.integrations.kubernetes.webhook.sources import NodesFile
    from imagematrix.integrations.kubernetes.webhook.state import PolicyOptions
    from imagematrix.selection.query import parse_where

    if exclude and events is None:
        raise UsageError("--exclude is for --events")
    if events is not None and nodes != CLUSTER:
        raise UsageError("--events is for --nodes cluster")
    if events is not None and not DNS_LABEL.fullmatch(events):
        raise UsageError(f"invalid --events: {events[:80]!r}", remedy="give the name of a Lease")
    api = find_cluster_api(REMEDY) if nodes == CLUSTER else None
    identity = f"{socket.gethostname()}_{secrets.token_hex(4)}"  # several pods may have one host's name
    lease = (
        Leadership(api=api, namespace=read_namespace(), name=events, identity=identity)
        if api and events
        else None
    )
    options = PolicyOptions(deny=is_denied(on_unknown), allow_cpu=allow_cpu, where=parse_where(where or ()))
    serve(
        WebhookSettings(
            catalogs=tuple(dict.fromkeys(catalog)),
            nodes=WatchedNodes(api) if api else NodesFile(Path(nodes)),
            chain=tls_cert,
            key=tls_key,
            listen=listen,
            health=health,
            options=options,
            policy=policy,
            events=Events(lease, exclude or ()) if lease else None,
        ),
        on_line=print_info,
    )
