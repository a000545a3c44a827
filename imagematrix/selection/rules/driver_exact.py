"""`driver-exact`: the driver in the image has the version of the kernel module.

Otherwise it refuses to work: NVML error 18, CUDA error 803. Source: NVIDIA open GPU kernel modules,
https://github.com/NVIDIA/open-gpu-kernel-modules#how-to-build.
"""

from __future__ import annotations

from imagematrix.selection import drivers
from imagematrix.selection.rule import Rule
from imagematrix.selection.selection_target import VIRTUAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.rule import Distance, Reason, Thresholds
    from imagematrix.selection.selection_target import Target

SAME = "use a variant and a kernel module with the same driver version"


def need(variant: Variant) -> str | None:
    """Return the version that the kernel module must have ("" if it is unknown), or None."""
    return (variant.driver.version or "") if variant.driver and variant.driver.mode == "exact" else None


def is_satisfied(target: Target, variant: Variant) -> bool:
    """Whether the versions are the same text, which is how the kernel module compares them.

    A virtual GPU needs the driver of its vGPU release, which only its node has.
    """
    kernel = target.kernel_driver
    return kernel is not None and need(variant) == kernel and not target.virtual


def thresholds(variant: Variant) -> Thresholds:
    """Return the version of the driver in the image, and the state of virtual GPUs."""
    return {"driver.version": filter(None, [drivers.get_baked_driver(variant)]), "gpus.state": (VIRTUAL,)}


def reason(target: Target, variant: Variant, *, ok: bool) -> Reason:
    """Return need, have, why and advice."""
    version, have = drivers.get_baked_driver(variant), target.kernel_driver
    if ok:
        return version, have, "the driver in the image is the one that the kernel has loaded", None
    if have is None:
        return version, have, drivers.NO_DRIVER, SAME
    if target.virtual:
        return version, have, drivers.explain_vgpu(target), drivers.OTHER
    why = f"the image carries driver {version}, which works only with its own kernel module"
    return version, have, f"{why}; the host has {have}", SAME


def distance(target: Target, variant: Variant) -> Distance:
    """Return how far the driver is from the kernel's: by branch, then within it."""
    return drivers.measure_version_distance(need(variant), target.kernel_driver)


RULE = Rule(
    name="driver-exact",
    facts=("driver.version", "gpus.state"),
    parts=("driver",),
    fact="driver",
    need=need,
    is_satisfied=is_satisfied,
    thresholds=thresholds,
    reason=reason,
    distance=distance,
)
