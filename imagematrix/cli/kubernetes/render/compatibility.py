"""`imagematrix kubernetes render compatibility`: an image-compatibility artifact of NFD for each variant."""

from __future__ import annotations

from imagematrix.cli.kubernetes.options import load_narrowed_catalog
from imagematrix.cli.kubernetes.render.options import print_manifests
from imagematrix.cli.shared.options import AllowCpu, CatalogName, Image, Policy, Where


def command(
    image: Image,
    catalog: CatalogName = None,
    policy: Policy = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
) -> None:
    """Write an image-compatibility artifact of Node Feature Discovery for each variant."""
    from imagematrix.integrations.kubernetes.workloads.compatibility import make_compatibility

    variants = load_narrowed_catalog(image, catalog, where, policy).variants
    print_manifests(make_compatibility(variant, allow_cpu=allow_cpu) for variant in variants)
