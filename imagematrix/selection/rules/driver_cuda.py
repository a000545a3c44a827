"""`driver-cuda`: the effective driver runs the image's CUDA release. Otherwise CUDA ends with error 35.

Sources: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html,
https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/index.html.
"""

from __future__ import annotations

from imagematrix.hardware.vendors import cuda, versions
from imagematrix.images.catalog.catalog import CLAIM
from imagematrix.selection import drivers
from imagematrix.selection.rule import Rule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.rule import Distance, Reason, Thresholds
    from imagematrix.selection.selection_target import Target


def need(variant: Variant) -> Hashable:
    """Return the CUDA release and the driver to run it as the variant states it, or None if CPU-only."""
    return (
        (variant.cuda, drivers.get_deciding_user_mode_driver(variant), variant.oldest_driver)
        if variant.cuda
        else None
    )


def is_satisfied(target: Target, variant: Variant) -> bool:
    """Whether the driver shipped with this release or a later one, or reaches the floor of its major."""
    driver = drivers.get_effective_driver(target, variant)
    if driver is None or variant.cuda is None:
        return False
    return cuda.can_run_cuda(variant.cuda, driver, variant.oldest_driver)


def thresholds(variant: Variant) -> Thresholds:
    """Return the oldest driver of this release, and of its major version; none if cuda-compat decides."""
    if variant.cuda is None or drivers.get_deciding_user_mode_driver(variant):
        return {}
    return {"driver.version": cuda.find_driver_bounds(variant.cuda, variant.oldest_driver)}


def reason(target: Target, variant: Variant, *, ok: bool) -> Reason:
    """Return need, have, why and advice."""
    release, driver = f"CUDA {variant.cuda}", drivers.get_effective_driver(target, variant)
    if driver is None:
        return release, None, drivers.NO_DRIVER, f"load an NVIDIA driver that runs {release}"
    have = f"{driver} (CUDA {cuda.get_newest_cuda(driver) or 'unknown'})"
    if ok:
        return release, have, f"driver {driver} runs {release}{_describe_assumption(variant)}", None
    if versions.is_tegra(driver):
        why = f"driver {driver} is a Tegra driver, whose CUDA release depends on its JetPack and is unknown"
        return release, have, why, "use a container made for this JetPack"
    lowest = cuda.get_lowest_driver(variant.cuda or "", variant.oldest_driver)
    if lowest is None:
        why = f"this release of imagematrix does not know which drivers run {release}"
        return release, have, why, "use a newer release of imagematrix"
    return (
        release,
        have,
        f"driver {driver} is too old for {release}{_describe_assumption(variant)}",
        drivers.OTHER,
    )


def _describe_assumption(variant: Variant) -> str:
    """Return in words that only the name of a file shows the release, if it is so."""
    names = [code.name for code in variant.code if versions.parse_release_in_name(code.name) == variant.cuda]
    if not names or variant.source("cuda") != CLAIM:
        return ""
    return f"; only names of files such as {names[0]} show the image's release"


def distance(target: Target, variant: Variant) -> Distance:
    """Return how much older the driver is than the oldest sufficient one."""
    lowest = cuda.get_lowest_driver(variant.cuda or "", variant.oldest_driver)
    return drivers.measure_version_distance(drivers.get_effective_driver(target, variant), lowest)


RULE = Rule(
    name="driver-cuda",
    facts=("driver.version",),
    parts=("cuda",),
    fact="cuda",
    need=need,
    is_satisfied=is_satisfied,
    thresholds=thresholds,
    reason=reason,
    distance=distance,
)
