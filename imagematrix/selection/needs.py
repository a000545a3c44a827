"""What of a variant the rules and the order look at: where all of it is equal, they see one and the same."""

from __future__ import annotations

from operator import attrgetter

from imagematrix.catalog.catalog import Variant

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

__all__ = [
    "code",
    "compat",
    "cpu",
    "cuda",
    "everything",
    "exact",
    "fatbin",
    "gpu_driver",
    "mode",
    "own_driver",
    "platform",
]

platform: Callable[[Variant], Hashable] = attrgetter("platform")
cpu: Callable[[Variant], Hashable] = attrgetter("cpu_flags", "signed_returns")
# All that a variant says of itself, which is all but what the store says of it.
everything: Callable[[Variant], Hashable] = attrgetter(
    *(name for name in Variant.__slots__ if name not in ("reference", "digest", "size"))
)


def exact(variant: Variant) -> str | None:
    """Return the driver version that must be the kernel's ("" where it is not known), or None."""
    return (variant.driver.version or "") if variant.driver and variant.driver.mode == "exact" else None


def compat(variant: Variant) -> Hashable:
    """Return the cuda-compat that must support the kernel's driver, or None."""
    return variant.driver if variant.driver and variant.driver.mode == "compat" else None


def gpu_driver(variant: Variant) -> str | None:
    """Return the user-mode driver that must support the GPUs ("" for the node's), or None without one."""
    if variant.driver:
        return variant.driver.version or ""
    return "" if variant.gpu or variant.cubins or variant.ptx else None


def cuda(variant: Variant) -> Hashable:
    """Return the CUDA release and what is said of the driver to run it, or None for a CPU-only variant."""
    return (variant.cuda, own_driver(variant), variant.oldest_driver) if variant.cuda else None


def code(variant: Variant) -> Hashable:
    """Return the device code and the driver to load it."""
    return variant.gpu, variant.cubins, variant.ptx, own_driver(variant)


def fatbin(variant: Variant) -> Hashable:
    """Return the driver to read compressed device code, or None where none is compressed."""
    return ("compressed", own_driver(variant)) if variant.compressed_fatbin else None


def mode(variant: Variant) -> str | None:
    """Return where the variant's libcuda comes from, or None for a CPU-only variant.

    A GPU variant that names no driver carries none, so that the node has to bring one: mode "host".
    """
    if variant.driver:
        return variant.driver.mode
    return "host" if variant.gpu else None


def own_driver(variant: Variant) -> str | None:
    """Return the version of the user-mode driver that decides in place of the kernel's, or None."""
    return variant.driver.version if variant.driver and variant.driver.mode == "compat" else None
