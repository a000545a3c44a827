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
    from imagematrix.selection.rule import Gap, Reason, Turns
    from imagematrix.selection.target import Target

__all__ = ["RULE"]


def need(variant: Variant) -> Hashable:
    """Return the driver to read compressed device code, or None if none is compressed."""
    return ("compressed", drivers.own(variant)) if variant.compressed_fatbin else None


def holds(target: Target, variant: Variant) -> bool:
    """Whether the driver is new enough."""
    driver = drivers.effective(target, variant)
    if driver is None or versions.is_tegra(driver):
        return False
    return versions.order(driver) >= versions.order(cuda.COMPRESSED_FATBIN_DRIVER)


def turns(variant: Variant) -> Turns:
    """Return the first driver that reads it; none if cuda-compat decides."""
    return {} if drivers.own(variant) else {"driver.version": (cuda.COMPRESSED_FATBIN_DRIVER,)}


def reason(target: Target, variant: Variant, *, ok: bool) -> Reason:
    """Return need, have, why and advice."""
    wanted, driver = f"{cuda.COMPRESSED_FATBIN_DRIVER} or newer", drivers.effective(target, variant)
    if ok:
        return wanted, driver, "the driver reads compressed device code", None
    why = f"driver {driver} cannot read compressed device code" if driver else drivers.NO_DRIVER
    return wanted, driver, why, "build it without compressed code (nvcc --compress-mode=none)"


def gap(target: Target, variant: Variant) -> Gap:
    """Return how much older the driver is than the first that reads it."""
    return drivers.between(drivers.effective(target, variant), cuda.COMPRESSED_FATBIN_DRIVER)


RULE = Rule(
    name="fatbin",
    facts=("driver.version",),
    parts=("compressed_fatbin",),
    fact="cubins",
    need=need,
    holds=holds,
    turns=turns,
    reason=reason,
    gap=gap,
)
