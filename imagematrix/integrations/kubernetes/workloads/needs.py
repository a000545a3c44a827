"""What the variants of an image need from nodes and devices, in the forms that schedulers read."""

from __future__ import annotations

from imagematrix.integrations.kubernetes.dra import slices
from imagematrix.integrations.kubernetes.nodes.labels import VOCABULARY
from imagematrix.integrations.kubernetes.workloads import devices, dra_selectors
from imagematrix.integrations.kubernetes.workloads.affinity import foreign, owned
from imagematrix.selection.needs.needs import needs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from imagematrix.images.catalog.catalog import Catalog, Variant

__all__ = ["DRA_DRIVERS", "SCHEMA", "document"]

SCHEMA = "imagematrix.needs/v1"
DRA_DRIVERS = (devices.DRIVER, slices.DRIVER)  # the DRA drivers whose devices can be selected


def document(
    catalog: Catalog, *, allow_cpu: bool = False, dra_driver: str = devices.DRIVER
) -> dict[str, Any]:
    """Return the Needs document of a catalog, with device selectors for one of the DRA drivers."""
    return {
        "schema": SCHEMA,
        "image": catalog.image,
        "version": catalog.version,
        "variants": [_variant(variant, dra_driver, allow_cpu=allow_cpu) for variant in catalog.variants],
    }


def _variant(variant: Variant, dra_driver: str, *, allow_cpu: bool) -> dict[str, Any]:
    ways = needs(variant, VOCABULARY, allow_cpu=allow_cpu)
    listed = needs(variant, VOCABULARY, allow_cpu=allow_cpu, listed=True)
    return {
        "reference": variant.reference,
        "digest": variant.digest,
        "terms": [{"matchExpressions": list(term)} for term in owned(ways)],
        "terms_without_labels": [{"matchExpressions": list(term)} for term in foreign(listed)],
        "device": dra_selectors.selector(ways) if dra_driver == slices.DRIVER else devices.selector(listed),
    }
