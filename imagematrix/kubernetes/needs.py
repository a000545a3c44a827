"""What the variants of an image need from nodes and devices, in the forms that schedulers read."""

from __future__ import annotations

from imagematrix.kubernetes.affinity import foreign, owned
from imagematrix.kubernetes.devices import selector
from imagematrix.kubernetes.labels import VOCABULARY
from imagematrix.needs.needs import needs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from imagematrix.catalog.catalog import Catalog, Variant

__all__ = ["SCHEMA", "document"]

SCHEMA = "imagematrix.needs/v1"


def document(catalog: Catalog, *, allow_cpu: bool = False) -> dict[str, Any]:
    """Return the Needs document of a catalog."""
    return {
        "schema": SCHEMA,
        "image": catalog.image,
        "version": catalog.version,
        "variants": [_variant(variant, allow_cpu=allow_cpu) for variant in catalog.variants],
    }


def _variant(variant: Variant, *, allow_cpu: bool) -> dict[str, Any]:
    ways = needs(variant, VOCABULARY, allow_cpu=allow_cpu)
    listed = needs(variant, VOCABULARY, allow_cpu=allow_cpu, listed=True)
    return {
        "reference": variant.reference,
        "digest": variant.digest,
        "terms": [{"matchExpressions": list(term)} for term in owned(ways)],
        "terms_without_labels": [{"matchExpressions": list(term)} for term in foreign(listed)],
        "device": selector(listed),
    }
