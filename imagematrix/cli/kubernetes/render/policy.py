"""`imagematrix kubernetes render policy`: an admission policy that gives pods the image of their class."""

from __future__ import annotations

from typing import Annotated

import typer

from imagematrix.cli.kubernetes.options import Nodes, OnUnknown, is_denied, load_classes, require_used_name
from imagematrix.cli.kubernetes.render.options import make_default_name, print_manifests, warn_of_omitted
from imagematrix.cli.shared.options import AllowCpu, CatalogName, Image, Policy, Where
from imagematrix.cli.shared.output import warn
from imagematrix.errors import UsageError

SHOWN = 3  # labels that a warning names


def command(
    image: Image,
    nodes: Nodes,
    catalog: CatalogName = None,
    policy: Policy = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="The policy's name; default: the image's, and version."),
    ] = None,
    on_unknown: OnUnknown = "default",
    used_as: Annotated[
        str | None,
        typer.Option("--as", metavar="NAME", help="The name to replace in pods; default: the image's."),
    ] = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
) -> None:
    """Write an admission policy that gives pods the image of their class, for Kubernetes 1.36 and newer.

    A pod with more than 40 containers or node selector terms, or 1,000 values in one, is left undecided. More
    than some 700 classes are refused, because `kubectl apply` keeps no larger object.
    """
    from imagematrix.common.text import format_count, shorten_words
    from imagematrix.integrations.kubernetes.admission.admission import require_class_labels
    from imagematrix.integrations.kubernetes.admission.cluster_policy import make_cluster_policy
    from imagematrix.integrations.kubernetes.admission.policy import make_policy_objects
    from imagematrix.integrations.kubernetes.client.objects import DNS_SUBDOMAIN
    from imagematrix.integrations.kubernetes.nodes.labels import CLASS
    from imagematrix.integrations.kubernetes.workloads.placement import require_labels
    from imagematrix.selection.query import parse_where

    if name is not None and not DNS_SUBDOMAIN.fullmatch(name):
        raise UsageError(f"invalid --name: {name[:80]!r}", remedy="give one such as training-v1")
    require_used_name(used_as)
    deny = is_denied(on_unknown)
    grouped = load_classes(nodes, image, catalog, allow_cpu=allow_cpu, where=where, policy=policy)
    require_labels(grouped.classes)
    require_class_labels(grouped.classes)
    version = grouped.catalog.version.lower().replace("_", "-").replace(".", "-")
    default_name = f"{make_default_name(grouped).lower()}-{version}".strip("-")
    # Without nodes that lack the class label and get no image: the same classes as in the webhook.
    admission = make_cluster_policy(
        [node for node_class in grouped.classes for node in node_class.nodes],
        grouped.catalog,
        name=used_as,
        deny=deny,
        allow_cpu=allow_cpu,
        where=parse_where(where or ()),
    ).policy
    print_manifests(make_policy_objects(admission, name or default_name))
    warn_of_omitted(grouped, grouped.classes)
    if admission.omitted_labels:
        labels = shorten_words(admission.omitted_labels, SHOWN)
        warn(
            f"no room in a policy for {format_count(len(admission.omitted_labels), 'label')}: {labels}",
            f"let pods that select nodes by them also select {CLASS}",
        )
