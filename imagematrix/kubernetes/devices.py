"""Needs as device selectors of dynamic resource allocation (DRA): CEL about one GPU of NVIDIA's DRA driver.

Attributes are those of cmd/gpu-kubelet-plugin/deviceinfo.go in https://github.com/NVIDIA/k8s-dra-driver-gpu.
They contain semantic versions: driver 580.65.06 appears as 580.65.6. So here, and nowhere else, drivers are
compared by their numbers. CPUs are not devices: node affinity covers CPU needs.
"""

from __future__ import annotations

from imagematrix.facts import gpus, versions
from imagematrix.kubernetes import labels as own
from imagematrix.kubernetes.affinity import TOP, runs
from imagematrix.kubernetes.needs import listed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.kubernetes.needs import Need

__all__ = ["DRIVER", "selector"]

DRIVER = "gpu.nvidia.com"
ATTRIBUTES = f'device.attributes["{DRIVER}"]'
PARTS = 3  # numbers in a semantic version


def selector(needs: Iterable[Need]) -> str | None:
    """Return the CEL expression that admits a GPU only if it meets what one of the needs asks of a GPU.

    It assumes that every GPU that the DRA driver publishes works with the loaded kernel modules. None if no
    need asks for a GPU.
    """
    groups = dict.fromkeys(_conditions(need) for need in listed(needs) if need.gpus)
    alternatives = [" && ".join(conditions) for conditions in groups if conditions is not None]
    if not groups:
        return None
    where = f'device.driver == "{DRIVER}"'
    if len(alternatives) == 1:
        return f"{where} && {alternatives[0]}"
    return f"{where} && ({' || '.join(f'({one})' for one in alternatives)})" if alternatives else "false"


def _conditions(need: Need) -> tuple[str, ...] | None:
    """Return the conditions of a need, or None if the attributes cannot express them."""
    if own.OTHER not in need.brands and not need.data_centre:
        return None  # the attributes write brands in another way
    driver, compute = f"{ATTRIBUTES}.driverVersion", f"{ATTRIBUTES}.cudaComputeCapability"
    expressions = []
    if need.driver and len(versions.order(need.driver)) > PARTS:
        return None  # a semantic version has no fourth number
    if need.driver:
        expressions.append(f"{driver}.compareTo({_semver(versions.order(need.driver))}) == 0")
    if need.oldest:
        expressions.append(f"{driver}.compareTo({_semver(need.oldest)}) >= 0")
    if need.below:
        expressions.append(f"{driver}.compareTo({_semver(need.below)}) < 0")
    computes = _supported(need)
    if computes is not None:
        if not computes:
            return None
        between = [" && ".join(_between(compute, *run)) for run in runs(computes)]
        expressions.append(
            between[0] if len(between) == 1 else f"({' || '.join(f'({one})' for one in between)})"
        )
    if need.data_centre:
        brands = ", ".join(f'"{brand}"' for brand in sorted({*need.brands} & gpus.DATA_CENTRE_BRANDS))
        others = "|".join(gpus.OTHER_NAMES)
        expressions.append(f"{ATTRIBUTES}.brand.lowerAscii() in [{brands}]")
        expressions.append(f'!{ATTRIBUTES}.productName.lowerAscii().matches("(^| )({others})( |$)")')
    return tuple(expressions)


def _supported(need: Need) -> tuple[int, ...] | None:
    """Return the capabilities whose products the image's user-mode driver all supports.

    Only a driver of mode compat can lack support for a published GPU: in the other modes the driver has the
    version of the kernel modules.
    """
    if need.computes is None:
        return None
    codes = (code for code in need.computes if code >= 0)
    if not need.data_centre or need.branch is None:
        return tuple(codes)
    ended = {compute for compute, last in gpus.first_ended().items() if last < need.branch}
    return tuple(code for code in codes if f"{code // 10}.{code % 10}" not in ended)


def _between(compute: str, first: int, last: int) -> Iterator[str]:
    if first > 0:
        yield f"{compute}.compareTo({_semver((first // 10, first % 10))}) >= 0"
    if last < TOP:
        yield f"{compute}.compareTo({_semver(((last + 1) // 10, (last + 1) % 10))}) < 0"


def _semver(version: tuple[int, ...]) -> str:
    """Return a bound as a semantic version; if it has a fourth part, the third is raised by one."""
    major, minor, patch = (*version, 0, 0)[:PARTS]
    return f'semver("{major}.{minor}.{patch + (len(version) > PARTS)}")'
