"""`imagematrix kubernetes render flavors`: a ResourceFlavor of Kueue for each class."""

from __future__ import annotations

from imagematrix.cli.kubernetes.options import Nodes, load_classes
from imagematrix.cli.kubernetes.render.options import Only, print_manifests
from imagematrix.cli.shared.options import AllowCpu, CatalogName, Image, Policy, Where


def command(
    image: Image,
    nodes: Nodes,
    catalog: CatalogName = None,
    policy: Policy = None,
    only: Only = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
) -> None:
    """Write a ResourceFlavor of Kueue for each class, or for those that --class names."""
    from imagematrix.integrations.kubernetes.workloads.manifests import make_flavors
    from imagematrix.integrations.kubernetes.workloads.placement import choose_classes

    grouped = load_classes(nodes, image, catalog, allow_cpu=allow_cpu, where=where, policy=policy)
    print_manifests(make_flavors(choose_classes(grouped.classes, only or ())))
