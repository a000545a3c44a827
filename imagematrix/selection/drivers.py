"""Drivers: which one decides about a variant, and the remedies that several rules share."""

from __future__ import annotations

from imagematrix.facts import gpus, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.catalog.catalog import Variant
    from imagematrix.node.host import Gpu
    from imagematrix.selection.target import Target

__all__ = [
    "FAR",
    "NO_DRIVER",
    "baked",
    "between",
    "effective",
    "last_for",
    "left_behind",
    "listed",
    "mode",
    "newer",
    "older",
    "own",
    "vgpu",
    "with_driver",
]

FAR = 10_000  # more than the distance of any two versions
NO_DRIVER = "no NVIDIA kernel module is loaded, or its version could not be read"


def mode(variant: Variant) -> str | None:
    """Return where the variant's libcuda comes from, or None for a CPU-only variant.

    A GPU variant that names no driver carries none, so the node has to provide one: mode "host".
    """
    if variant.driver:
        return variant.driver.mode
    return "host" if variant.gpu else None


def baked(variant: Variant) -> str:
    """Return the version of the driver in the image, or "" if it has none."""
    return (variant.driver and variant.driver.version) or ""


def own(variant: Variant) -> str | None:
    """Return the version of the user-mode driver that decides in place of the kernel's, or None."""
    return variant.driver.version if variant.driver and variant.driver.mode == "compat" else None


def effective(target: Target, variant: Variant) -> str | None:
    """Return the driver that decides about CUDA: the user-mode one in mode compat, else the kernel's."""
    return own(variant) or target.kernel_driver


def left_behind(target: Target, driver: str) -> list[Gpu]:
    """Return the GPUs passed that `driver` no longer supports."""
    branch = versions.branch(driver)
    return [gpu for gpu in target.gpus if (last := last_branch(gpu)) is not None and last < branch]


def last_branch(gpu: Gpu) -> int | None:
    """Return the last driver branch that supports a GPU; None if the newest does, or if it is unknown."""
    return gpus.last_branch(gpu.pci_device_id, gpu.compute)


def last_for(left: list[Gpu]) -> int:
    """Return the last driver branch that supports all of the GPUs that `left_behind` returned."""
    return min(filter(None, map(last_branch, left)))


def with_driver(target: Target, kernel: str) -> str:
    """Return the remedy if the driver in the image does not work with the kernel's."""
    left = left_behind(target, kernel)
    if left:
        return older(target, last_for(left))
    return f"build a variant with driver {kernel}"


def older(target: Target, last: int) -> str:
    """Return the remedy if a driver dropped a GPU that branch `last` was the last to support."""
    kernel = target.kernel_driver
    if kernel is not None and left_behind(target, kernel):
        return f"keep this host at a driver of branch {last} or older"
    return f"build a variant with a driver of branch {last} or older, or with none of its own (driver: host)"


def newer(variant: Variant, driver: str) -> str:
    """Return the remedy if the effective driver has to be `driver` or newer."""
    return (
        f"build a variant with cuda-compat {driver} or newer" if own(variant) else f"driver {driver} or newer"
    )


def vgpu(target: Target) -> tuple[str, str]:
    """Return why a virtual GPU takes no driver from an image, and the remedy."""
    labels = listed([gpu.label for gpu in target.virtual])
    why = f"{labels}: a virtual GPU needs the driver of its vGPU release, which its node provides"
    return why, "build a variant with no driver of its own (driver: host)"


def listed(words: list[str]) -> str:
    """Return words as a list in a sentence."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def between(one: str | None, other: str | None) -> tuple[int, ...]:
    """Return how far apart two versions are, part by part; FAR if one is unknown."""
    if not one or not other:
        return (FAR,)
    return tuple(abs(a - b) for a, b in zip(versions.order(one), versions.order(other), strict=False))
