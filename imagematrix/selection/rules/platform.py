"""`platform`: the image is for the host's CPU architecture. Otherwise it ends with "exec format error".

Source: OCI image index, https://github.com/opencontainers/image-spec/blob/main/image-index.md.
"""

from __future__ import annotations

from imagematrix.selection.rule import Rule
from imagematrix.selection.selection_target import get_machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.rule import Distance, Reason, Thresholds
    from imagematrix.selection.selection_target import Target


def need(variant: Variant) -> str:
    """Return the platform."""
    return variant.platform


def is_satisfied(target: Target, variant: Variant) -> bool:
    """Whether the architecture is the host's. Its variants (amd64/v3) are left to the rule `cpu`."""
    return variant.platform == target.platform or variant.platform.startswith(f"{target.platform}/")


def thresholds(variant: Variant) -> Thresholds:
    """Return the architecture of the platform."""
    return {"arch": (get_machine(variant.platform),)}


def reason(target: Target, variant: Variant, *, ok: bool) -> Reason:
    """Return need, have, why and advice."""
    if ok:
        return variant.platform, target.platform, "the image is for the host's CPU architecture", None
    why = f"the image is for {variant.platform}, and the host runs {target.platform}"
    return variant.platform, target.platform, why, None


def distance(_: Target, __: Variant) -> Distance:
    """Return the same for all: no architecture is nearer than another."""
    return (1,)


RULE = Rule(
    name="platform",
    facts=("arch",),
    parts=("platform",),
    fact="platform",
    need=need,
    is_satisfied=is_satisfied,
    thresholds=thresholds,
    reason=reason,
    distance=distance,
)
