"""`driver-host`: the node's user-mode driver, which an image without one gets, is that of the kernel module.

Otherwise it refuses to work: NVML error 18, CUDA error 803. It holds if the version is unknown. Source:
NVIDIA open GPU kernel modules, https://github.com/NVIDIA/open-gpu-kernel-modules#how-to-build.
"""

from __future__ import annotations

from imagematrix.hardware.vendors import versions
from imagematrix.selection import drivers
from imagematrix.selection.rule import Rule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.rule import Distance, Reason, Thresholds
    from imagematrix.selection.selection_target import Target

HOST = "host"


def need(variant: Variant) -> str | None:
    """Return "host" if the node provides the user-mode driver, or None."""
    return HOST if drivers.get_driver_mode(variant) == HOST else None


def is_satisfied(target: Target, _: Variant) -> bool:
    """Whether the node's two drivers have the same version, or the version of one is unknown."""
    driver = target.host.driver
    return driver is None or not driver.user_mode_differs


def thresholds(_: Variant) -> Thresholds:
    """Return that the versions differ."""
    return {"driver.user_mode_differs": (True,)}


def reason(target: Target, variant: Variant, *, ok: bool) -> Reason:  # noqa: ARG001
    """Return need, have, why and advice."""
    kernel, user_mode = target.kernel_driver, _get_user_mode_driver(target)
    wanted = f"the node's user-mode driver {kernel}" if kernel else "the node's user-mode driver"
    if not ok:
        from imagematrix.hardware.host.nvidia import RELOAD, describe_mismatch

        return wanted, user_mode, describe_mismatch(user_mode, kernel or ""), RELOAD
    if user_mode is None:
        return wanted, None, "the version of the node's user-mode driver is unknown", None
    return wanted, user_mode, "the node's user-mode driver has the version of the kernel module", None


def distance(target: Target, _: Variant) -> Distance:
    """Return how far the user-mode driver is from the kernel's: by branch, then within it."""
    user_mode = _get_user_mode_driver(target)
    # Labels of nodes tell only that the versions differ.
    known = user_mode if user_mode and versions.DRIVER.fullmatch(user_mode) else None
    return drivers.measure_version_distance(known, target.kernel_driver)


def warn(target: Target, _: Variant) -> Iterator[str]:
    """Yield that the version of a driver's user-mode part is unknown."""
    if target.host.driver and _get_user_mode_driver(target) is None:
        yield (
            "the version of the node's own user-mode driver is unknown: if it is not that of the kernel "
            "module, the image will not work"
        )


def _get_user_mode_driver(target: Target) -> str | None:
    return target.host.driver.user_mode if target.host.driver else None


RULE = Rule(
    name="driver-host",
    facts=("driver.version", "driver.user_mode"),
    parts=("driver",),
    fact="driver",
    need=need,
    is_satisfied=is_satisfied,
    thresholds=thresholds,
    reason=reason,
    distance=distance,
    warn=warn,
)
