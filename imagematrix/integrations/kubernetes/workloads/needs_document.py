"""What the variants of an image need from nodes and devices, in the forms that schedulers read."""

from __future__ import annotations

from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.dra import slices
from imagematrix.integrations.kubernetes.nodes.labels import VOCABULARY
from imagematrix.integrations.kubernetes.workloads import dra_selectors, nvidia_dra_selectors
from imagematrix.integrations.kubernetes.workloads.affinity import (
    make_terms_for_foreign_labels,
    make_terms_for_our_labels,
)
from imagematrix.selection.needs.node_needs import derive_needs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from imagematrix.images.catalog.catalog import Catalog

SCHEMA = "imagematrix.needs/v1"
DRA_DRIVERS = (nvidia_dra_selectors.DRIVER, slices.DRIVER)  # the DRA drivers whose devices can be selected


def make_needs_document(
    catalog: Catalog, *, allow_cpu: bool = False, dra_driver: str = nvidia_dra_selectors.DRIVER
) -> dict[str, Any]:
    """Return the Needs document of a catalog, with device selectors for one of the DRA drivers.

    Raises UsageError if an API server would refuse a selector for its length.
    """
    variants = []
    for variant in catalog.variants:
        needs = derive_needs(variant, VOCABULARY, allow_cpu=allow_cpu)
        listed_needs = derive_needs(variant, VOCABULARY, allow_cpu=allow_cpu, listed=True)
        device = (
            dra_selectors.make_selector(needs)
            if dra_driver == slices.DRIVER
            else nvidia_dra_selectors.make_nvidia_selector(listed_needs)
        )
        if device and len(device) > nvidia_dra_selectors.LONGEST:
            raise UsageError(
                f"{variant.reference}: its selector for devices of {dra_driver} would have {len(device)} "
                f"characters, and Kubernetes admits {nvidia_dra_selectors.LONGEST}",
                remedy="leave this variant out with --where, or state fewer requirements in the image",
            )
        variants.append(
            {
                "reference": variant.reference,
                "digest": variant.digest,
                "terms": [{"matchExpressions": list(term)} for term in make_terms_for_our_labels(needs)],
                "terms_without_labels": [
                    {"matchExpressions": list(term)} for term in make_terms_for_foreign_labels(listed_needs)
                ],
                "device": device,
            }
        )
    return {"schema": SCHEMA, "image": catalog.image, "version": catalog.version, "variants": variants}
