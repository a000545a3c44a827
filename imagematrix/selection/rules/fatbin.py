"""`fatbin`: the effective driver reads compressed device code (nvcc --compress-mode).

An older driver reports an invalid device kernel image. Source:
https://docs.nvidia.com/cuda/cuda-compiler-driver-nvcc/.
"""

from __future__ import annotations

from imagematrix.hardware.vendors import cuda, versions
from imagematrix.selection import drivers
from imagematrix.selection.rule import Rule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.rule import Distance, Reason, Thresholds
    from imagematrix.selection.selection_target import Target


def need(variant: Variant) -> Hashable:
    """Return the driver to read compressed device code, or None if none is compressed."""
    return (
        ("compressed", drivers.get_deciding_user_mode_driver(variant)) if variant.compressed_fatbin else None
    )


def is_satisfied(target: Target, variant: Variant) -> bool:
    """Whether the driver is new enough."""
    driver = drivers.get_effective_driver(target, variant)
    if driver is None or versions.is_tegra(driver):
        return False
    return versions.make_sort_key(driver) >= versions.make_sort_key(cuda.COMPRESSED_FATBIN_DRIVER)


def thresholds(variant: Variant) -> Thresholds:
    """Return the first driver that reads it; none if cuda-compat decides."""
    return (
        {}
        if drivers.get_deciding_user_mode_driver(variant)
        else {"driver.version": (cuda.COMPRESSED_FATBIN_DRIVER,)}
    )


def reason(target: Target, variant: Variant, *, ok: bool) -> Reason:
    """Return need, have, why and advice."""
    wanted, driver = (
        f"{cuda.COMPRESSED_FATBIN_DRIVER} or newer",
        drivers.get_effective_driver(target, variant),
    )
    if ok:
        return wanted, driver, "the driver reads compressed device code", None
    why = f"driver {driver} cannot read compressed device code" if driver else drivers.NO_DRIVER
    return wanted, driver, why, "build it without compressed code (nvcc --compress-mode=none)"


def distance(target: Target, variant: Variant) -> Distance:
    """Return how much older the driver is than the first that reads it."""
    return drivers.measure_version_distance(
        drivers.get_effective_driver(target, variant), cuda.COMPRESSED_FATBIN_DRIVER
    )


RULE = Rule(
    name="fatbin",
    facts=("driver.version",),
    parts=("compressed_fatbin",),
    fact="cubins",
    need=need,
    is_satisfied=is_satisfied,
    thresholds=thresholds,
    reason=reason,
    distance=distance,
)
