"""`imagematrix kubernetes render daemonset`: a DaemonSet for each class."""

from __future__ import annotations

from imagematrix.cli.kubernetes.options import Nodes, load_classes
from imagematrix.cli.kubernetes.render.options import (
    Arguments,
    Only,
    PullSecret,
    WorkloadName,
    make_default_name,
)
from imagematrix.cli.kubernetes.render.workload import (
    NVIDIA,
    PodGpus,
    Resource,
    print_workload,
)
from imagematrix.cli.shared.options import AllowCpu, CatalogName, Image, Policy, Where


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
    pull_secret: PullSecret = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
) -> None:
    """Write a DaemonSet for each class, or for those that --class names."""
    from imagematrix.integrations.kubernetes.workloads.manifests import Workload

    classes = load_classes(nodes, image, catalog, allow_cpu=allow_cpu, where=where, policy=policy)
    workload = Workload(
        name=name or make_default_name(classes),
        arguments=tuple(arguments or ()),
        gpus=gpus,
        resource=resource,
        pull_secret=pull_secret,
    )
    print_workload("daemonset", classes, only, workload)
