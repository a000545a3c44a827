"""`imagematrix kubernetes render prepull`: DaemonSets that pull the image of each class to its nodes."""

from __future__ import annotations

from typing import Annotated

import typer

from imagematrix.cli.kubernetes.options import Nodes, load_classes
from imagematrix.cli.kubernetes.render.options import (
    Only,
    PullSecret,
    make_default_name,
    print_manifests,
    require_registry,
    warn_of_omitted,
)
from imagematrix.cli.shared.options import AllowCpu, CatalogName, Image, Policy, Where

SUFFIX = "-prepull"
LONGEST = 63


def command(
    image: Image,
    nodes: Nodes,
    catalog: CatalogName = None,
    policy: Policy = None,
    only: Only = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="The DaemonSets' name; default: the image's, -prepull."),
    ] = None,
    pause: Annotated[
        str,
        typer.Option("--pause", metavar="IMAGE", help="The image of the container that stays in each pod."),
    ] = "registry.k8s.io/pause:3.10",
    pull_secret: PullSecret = None,
    at_once: Annotated[
        int | None,
        typer.Option(
            "--at-once",
            min=1,
            metavar="N",
            help="Let at most N nodes of a class pull a new version at the same time; default: all.",
        ),
    ] = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
) -> None:
    """Write a DaemonSet for each class that pulls the class's image to its nodes, before a pod needs it."""
    from imagematrix.integrations.kubernetes.workloads.placement import choose_classes
    from imagematrix.integrations.kubernetes.workloads.prepull import make_prepull_manifests

    grouped = load_classes(nodes, image, catalog, allow_cpu=allow_cpu, where=where, policy=policy)
    require_registry(f"{grouped.catalog.image}:{grouped.catalog.version}")
    classes = choose_classes(grouped.classes, only or ())
    name = name or f"{make_default_name(grouped)[: LONGEST - len(SUFFIX)].rstrip('-')}{SUFFIX}"
    print_manifests(
        make_prepull_manifests(name, classes, pause=pause, pull_secret=pull_secret, at_once=at_once)
    )
    warn_of_omitted(grouped, classes)
