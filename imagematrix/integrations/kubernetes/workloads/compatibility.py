"""Image compatibility artifacts of Node Feature Discovery (v1alpha1), which state an image's needs.

Their rules match the features that our labels become in NFD (`local.feature`). Source:
https://kubernetes-sigs.github.io/node-feature-discovery, "Image Compatibility Artifact".
"""

from __future__ import annotations

from itertools import product

from imagematrix.integrations.kubernetes.nodes import labels as our_labels
from imagematrix.integrations.kubernetes.workloads.affinity import (
    make_terms_for_our_labels,
    match_label,
    match_no_label,
    match_value_in,
)
from imagematrix.selection.needs.node_needs import derive_needs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.integrations.kubernetes.workloads.affinity import Term

FEATURE = "local.feature"
NEVER = (match_label(our_labels.ARCH), match_no_label(our_labels.ARCH))  # NFD matches rules without terms


def make_compatibility(variant: Variant, *, allow_cpu: bool = False) -> dict[str, Any]:
    """Return the specification for a variant: a node is compatible if one of the alternatives matches.

    For a variant that no node fits, no node is compatible.
    """
    needs = derive_needs(variant, our_labels.VOCABULARY, allow_cpu=allow_cpu)
    terms = [
        (
            match_value_in(our_labels.ARCH, need.arch),
            *(requirement for requirement in term if requirement["key"].startswith(our_labels.PREFIX)),
        )
        for need, term in zip(needs, make_terms_for_our_labels(needs), strict=True)
    ]
    alternatives = [_make_matchers(split) for term in terms or [NEVER] for split in _split_term(term)]
    rule = {"name": "imagematrix", "matchAny": [{"matchFeatures": matchers} for matchers in alternatives]}
    description = f"needs of {variant.reference}" if needs else f"no node fits {variant.reference}"
    return {
        "version": "v1alpha1",
        "compatibilities": [{"description": description, "rules": [rule]}],
    }


def _split_term(term: Term) -> Iterator[Term]:
    """Yield terms that NFD matches as Kubernetes matches this one: NFD's NotIn needs a feature to exist."""
    return product(
        *(
            (match_no_label(requirement["key"]), requirement)
            if requirement["operator"] == "NotIn"
            else (requirement,)
            for requirement in term
        )
    )


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
