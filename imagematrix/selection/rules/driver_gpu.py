"""`driver-gpu`: the drivers already and still support every GPU, and the loaded kernel modules drive it.

Otherwise CUDA finds no device (error 100) or ends with error 803, though the kernel's driver works. The first
branch for a GPU is that of the first CUDA release that compiles for it. Sources:
https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/,
NVIDIA's supported-gpus.json, https://download.nvidia.com/XFree86/Linux-x86_64/560.28.03/README/kernel_open.html.
"""

from __future__ import annotations

from imagematrix.hardware.vendors import gpus, versions
from imagematrix.selection import drivers
from imagematrix.selection.rule import Rule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.hardware.host.host import Gpu
    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.rule import Distance, Reason, Thresholds
    from imagematrix.selection.selection_target import Target


def need(variant: Variant) -> tuple[int, bool] | tuple[()] | None:
    """Return the branch of the user-mode driver and whether it is Tegra's (nothing if it is the node's).

    Return None if the variant needs none.
    """
    baked = drivers.get_baked_driver(variant)
    if baked:
        return versions.get_branch(baked), versions.is_tegra(baked)
    return () if variant.driver or variant.gpu else None


def is_satisfied(target: Target, variant: Variant) -> bool:
    """Whether the driver supports every GPU, and the kind of kernel module drives it."""
    driver = _get_user_mode_driver(target, variant)
    return driver is not None and not (
        drivers.find_gpus_dropped_by(target, driver)
        or drivers.find_gpus_newer_than(target, driver)
        or _find_undriven_gpus(target)
    )


def thresholds(variant: Variant) -> Thresholds:
    """Return the branches that are the first or the last to support GPUs, and the capabilities of these."""
    baked = drivers.get_baked_driver(variant)
    branches = (versions.get_branch(baked),) if baked else tuple(sorted(gpus.list_last_branches()))
    first = gpus.list_first_branches()
    bounds = {
        *drivers.get_branch_bounds(() if baked else branches),
        *(f"{branch}.0" for branch in first.values()),
    }
    return {
        "driver.version": tuple(sorted(bounds, key=versions.make_sort_key)),
        "driver.kind": tuple(gpus.get_module_bounds()),
        "gpus.last_branch": branches,
        "gpus.compute": tuple(
            sorted({*first, *gpus.get_module_bounds().values()}, key=versions.make_sort_key)
        ),
    }


def reason(target: Target, variant: Variant, *, ok: bool) -> Reason:
    """Return need, have, why and advice."""
    driver = _get_user_mode_driver(target, variant)
    wanted = "a driver that supports every GPU passed"
    if ok:
        return wanted, driver, f"driver {driver} is not known to lack support for a GPU that is passed", None
    if driver is None:
        return wanted, driver, drivers.NO_DRIVER, "load an NVIDIA driver"
    if dropped := drivers.find_gpus_dropped_by(target, driver):
        last = min(gpu.last_branch for gpu in dropped if gpu.last_branch)
        labels = drivers.join_words([gpu.label for gpu in dropped])
        why = f"driver {driver} does not support {labels}: branch {last} is the last that does"
        wanted = f"a driver of branch {last} or older"
        return wanted, driver, why, f"use {wanted}, and a variant that it runs"
    if newer := drivers.find_gpus_newer_than(target, driver):
        first = max(gpus.get_first_branch(gpu.compute) for gpu in newer)
        labels = drivers.join_words([gpu.label for gpu in newer])
        have = min(filter(None, (driver, target.kernel_driver)), key=versions.make_sort_key)
        why = f"driver {have} does not support {labels}: branch {first} is the first that does"
        wanted = f"a driver of branch {first} or newer"
        return wanted, have, why, f"install {wanted}, and use a variant that it runs"
    kind = target.host.driver.kind if target.host.driver else None
    labels = drivers.join_words([gpu.label for gpu in _find_undriven_gpus(target)])
    why = f"the {kind} kernel modules of NVIDIA's driver do not drive {labels}"
    other_kind = "proprietary" if kind == "open" else "open"
    modules = f"the {other_kind} kernel modules"
    return modules, f"{driver} ({kind})", why, f"install {modules}"


def distance(target: Target, variant: Variant) -> Distance:
    """Return how many GPUs the driver does not support."""
    driver = _get_user_mode_driver(target, variant)
    if driver is None:
        return (drivers.FAR,)
    return (
        len(drivers.find_gpus_dropped_by(target, driver)) + len(drivers.find_gpus_newer_than(target, driver)),
    )


def _get_user_mode_driver(target: Target, variant: Variant) -> str | None:
    """Return the user-mode driver: the image's, or the node's if the image has none."""
    return drivers.get_baked_driver(variant) or target.kernel_driver


def _find_undriven_gpus(target: Target) -> list[Gpu]:
    """Return the GPUs that the loaded kind of kernel modules, open or proprietary, does not drive.

    The open ones drive Turing and newer GPUs, the proprietary ones none from Blackwell on.
    """
    driver = target.host.driver
    return [gpu for gpu in target.gpus if driver and not gpus.is_supported(driver.kind, gpu.compute)]


RULE = Rule(
    name="driver-gpu",
    facts=("driver.version", "driver.kind", "gpus.pci_device_id", "gpus.compute"),
    parts=("driver",),
    fact="driver",
    need=need,
    is_satisfied=is_satisfied,
    thresholds=thresholds,
    reason=reason,
    distance=distance,
)
