"""What the commands that write a workload share: their options, and the manifests of the workload."""

from __future__ import annotations

from typing import Annotated

import typer

from imagematrix.cli.kubernetes.options import Nodes, load_classes
from imagematrix.cli.kubernetes.render.options import (
    Arguments,
    Only,
    PullSecret,
    WorkloadName,
    make_default_name,
    print_manifests,
    require_registry,
    warn_of_omitted,
)
from imagematrix.cli.shared.options import AllowCpu, CatalogName, Image, Policy, Where

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from imagematrix.integrations.kubernetes.nodes.classes import Classes
    from imagematrix.integrations.kubernetes.workloads.manifests import Workload

PodGpus = Annotated[int | None, typer.Option("--gpus", min=1, metavar="N", help="GPUs for each pod.")]
Resource = Annotated[
    str, typer.Option("--resource", metavar="NAME", help="The cluster's resource name for GPUs.")
]
Pods = Annotated[
    int,
    typer.Option("--pods", min=1, metavar="N", help="The number of pods, such as ranks or replicas."),
]
NVIDIA = "nvidia.com/gpu"


def make_counted_command(kind: str, what: str) -> Callable[..., None]:
    """Return the command for a kind of workload that has a number of pods; `what` is its help."""

    def command(
        image: Image,
        nodes: Nodes,
        arguments: Arguments = None,
        catalog: CatalogName = None,
        policy: Policy = None,
        only: Only = None,
        name: WorkloadName = None,
        gpus: PodGpus = None,
        resource: Resource = NVIDIA,
        pods: Pods = 1,
        pull_secret: PullSecret = None,
        where: Where = None,
        allow_cpu: AllowCpu = False,
    ) -> None:
        from imagematrix.integrations.kubernetes.workloads.manifests import Workload

        classes = load_classes(nodes, image, catalog, allow_cpu=allow_cpu, where=where, policy=policy)
        workload = Workload(
            name=name or make_default_name(classes),
            arguments=tuple(arguments or ()),
            gpus=gpus,
            resource=resource,
            pods=pods,
            pull_secret=pull_secret,
        )
        print_workload(kind, classes, only, workload)

    command.__doc__ = what
    return command


def print_workload(kind: str, grouped: Classes, only: Sequence[str] | None, workload: Workload) -> None:
    """Print the manifests of a workload for the classes that are named, and warn of those without pods."""
    from imagematrix.integrations.kubernetes.workloads.manifests import make_workload_manifests
    from imagematrix.integrations.kubernetes.workloads.placement import choose_classes

    require_registry(f"{grouped.catalog.image}:{grouped.catalog.version}")
    classes = choose_classes(grouped.classes, only or ())
    print_manifests(make_workload_manifests(kind, workload, classes))
    warn_of_omitted(grouped, classes)
