"""Image compatibility artifacts of Node Feature Discovery (v1alpha1), which state an image's needs.

Their rules match the features that our labels become in NFD (`local.feature`). Source:
https://kubernetes-sigs.github.io/node-feature-discovery, "Image Compatibility Artifact".
"""

from __future__ import annotations

from imagematrix.integrations.kubernetes.nodes import labels as own
from imagematrix.integrations.kubernetes.workloads.affinity import match_value_in, terms_for_our_labels
from imagematrix.selection.needs.node_needs import derive_needs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.integrations.kubernetes.workloads.affinity import Requirement, Term

FEATURE = "local.feature"


def make_compatibility(variant: Variant, *, allow_cpu: bool = False) -> dict[str, Any]:
    """Return the specification for a variant: a node is compatible if one of the alternatives matches."""
    ways = derive_needs(variant, own.VOCABULARY, allow_cpu=allow_cpu)
    terms = [
        (
            match_value_in(own.ARCH, way.arch),
            *(asked for asked in term if asked["key"].startswith(own.PREFIX)),
        )
        for way, term in zip(ways, terms_for_our_labels(ways), strict=True)
    ]
    rule = {"name": "imagematrix", "matchAny": [{"matchFeatures": _make_matchers(term)} for term in terms]}
    return {
        "version": "v1alpha1",
        "compatibilities": [{"description": f"needs of {variant.reference}", "rules": [rule]}],
    }


def _make_matchers(term: Term) -> list[dict[str, Any]]:
    """Return the matchers of a term; a key can occur only once in each."""
    features: list[dict[str, Any]] = []
    for requirement in term:
        key = requirement["key"]
        matchers = next((some for some in features if key not in some), None)
        if matchers is None:
            features.append(matchers := {})
        matchers[key] = _make_matcher(requirement)
    return [{"feature": FEATURE, "matchExpressions": expressions} for expressions in features]


def _make_matcher(requirement: Requirement) -> dict[str, Any]:
    values = {"value": requirement["values"]} if "values" in requirement else {}
    return {"op": requirement["operator"], **values}
