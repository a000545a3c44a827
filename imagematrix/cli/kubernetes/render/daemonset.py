"""`imagematrix kubernetes render daemonset`: a DaemonSet for each class."""

from __future__ import annotations

from imagematrix.cli.kubernetes.options import Nodes, load_classes
from imagematrix.cli.kubernetes.render.options import Arguments, Only, PullSecret, WorkloadName
from imagematrix.cli.kubernetes.render.workload import (
    NVIDIA,
    PodGpus,
    Resource,
    WorkloadOptions,
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
    classes = load_classes(nodes, image, catalog, gpus=None, allow_cpu=allow_cpu, where=where, policy=policy)
    options = WorkloadOptions(
        name=name, arguments=arguments, gpus=gpus, resource=resource, pods=1, pull_secret=pull_secret
    )
    print_workload("daemonset", classes, only or (), options)
