"""Image compatibility artifacts of Node Feature Discovery (v1alpha1), which state an image's needs.

Their rules match the features that our labels become in NFD (`local.feature`). Source:
https://kubernetes-sigs.github.io/node-feature-discovery, "Image Compatibility Artifact".
"""

from __future__ import annotations

from imagematrix.integrations.kubernetes.nodes import labels as our_labels
from imagematrix.integrations.kubernetes.workloads.affinity import make_terms_for_our_labels, match_value_in
from imagematrix.selection.needs.node_needs import derive_needs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.integrations.kubernetes.workloads.affinity import Term

FEATURE = "local.feature"


def make_compatibility(variant: Variant, *, allow_cpu: bool = False) -> dict[str, Any]:
    """Return the specification for a variant: a node is compatible if one of the alternatives matches."""
    needs = derive_needs(variant, our_labels.VOCABULARY, allow_cpu=allow_cpu)
    terms = [
        (
            match_value_in(our_labels.ARCH, need.arch),
            *(requirement for requirement in term if requirement["key"].startswith(our_labels.PREFIX)),
        )
        for need, term in zip(needs, make_terms_for_our_labels(needs), strict=True)
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
        matchers = next((expressions for expressions in features if key not in expressions), None)
        if matchers is None:
            features.append(matchers := {})
        values = {"value": requirement["values"]} if "values" in requirement else {}
        matchers[key] = {"op": requirement["operator"], **values}
    return [{"feature": FEATURE, "matchExpressions": expressions} for expressions in features]
