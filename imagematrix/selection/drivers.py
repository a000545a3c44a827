"""Drivers: which one decides about a variant, and the words that several rules share."""

from __future__ import annotations

from imagematrix.hardware.vendors import gpus, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.hardware.host.host import Gpu
    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.selection_target import Target

FAR = 10_000  # more than the distance of any two versions
OTHER = "use a variant with another driver"  # advice if no single change helps
NO_DRIVER = "no NVIDIA kernel module is loaded, or its version could not be read"


def get_driver_mode(variant: Variant) -> str | None:
    """Return where the variant's libcuda comes from, or None for a CPU-only variant.

    A GPU variant that names no driver carries none, so the node has to provide one: mode "host".
    """
    if variant.driver:
        return variant.driver.mode
    return "host" if variant.gpu else None


def get_baked_driver(variant: Variant) -> str:
    """Return the version of the driver in the image, or "" if it has none."""
    return (variant.driver and variant.driver.version) or ""


def get_deciding_user_mode_driver(variant: Variant) -> str | None:
    """Return the version of the user-mode driver that decides in place of the kernel's, or None."""
    return variant.driver.version if variant.driver and variant.driver.mode == "compat" else None


def get_effective_driver(target: Target, variant: Variant) -> str | None:
    """Return the driver that decides about CUDA: the user-mode one in mode compat, else the kernel's."""
    return get_deciding_user_mode_driver(variant) or target.kernel_driver


def find_gpus_dropped_by(target: Target, driver: str) -> list[Gpu]:
    """Return the GPUs passed that `driver` no longer supports."""
    branch = versions.get_branch(driver)
    return [gpu for gpu in target.gpus if (last := gpu.last_branch) is not None and last < branch]


def find_gpus_newer_than(target: Target, driver: str) -> list[Gpu]:
    """Return the GPUs passed that `driver`, or the one of the kernel, is too old for.

    Drivers of Tegra parts come with JetPack, and have other branches.
    """
    known = [name for name in (driver, target.kernel_driver) if name and not versions.is_tegra(name)]
    branch = min(map(versions.get_branch, known), default=None)
    return [gpu for gpu in target.gpus if branch is not None and branch < gpus.get_first_branch(gpu.compute)]


def explain_vgpu(target: Target) -> str:
    """Return why a virtual GPU takes no driver from an image."""
    labels = join_words([gpu.label for gpu in target.virtual])
    return f"{labels}: a virtual GPU needs the driver of its vGPU release, which its node provides"


def join_words(words: list[str]) -> str:
    """Return words as a list in a sentence."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def get_branch_bounds(branches: Iterable[int]) -> tuple[str, ...]:
    """Return the versions at which driver branches begin and end."""
    return tuple(f"{bound}.0" for branch in sorted(branches) for bound in (branch, branch + 1))


def measure_version_distance(first: str | None, second: str | None) -> tuple[int, ...]:
    """Return how far apart two versions are, part by part; FAR if one is unknown."""
    if not first or not second:
        return (FAR,)
    parts = zip(versions.make_sort_key(first), versions.make_sort_key(second), strict=False)
    return tuple(abs(a - b) for a, b in parts)
