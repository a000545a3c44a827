"""How far a variant is from holding a rule: what tells the nearest of several that all fail it.

Each function is asked only where the rule does not hold, and returns numbers to be compared in their order.
"""

from __future__ import annotations

from imagematrix.facts import cuda, versions
from imagematrix.facts.device_code import capability
from imagematrix.selection import needs, verdicts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.catalog.catalog import Variant
    from imagematrix.node.host import Gpu
    from imagematrix.selection.node import Node

__all__ = [
    "cpu",
    "device_code",
    "driver_compat",
    "driver_cuda",
    "driver_exact",
    "driver_gpu",
    "fatbin",
    "platform",
]

Gap = tuple[int, ...]
FAR = 10_000  # more than any two versions are apart


def platform(_: Node, __: Variant) -> Gap:
    """Return the same for all: no architecture is nearer than another."""
    return (1,)


def driver_exact(node: Node, variant: Variant) -> Gap:
    """Return how far the baked driver is from the kernel's: by branch, then within it."""
    return _between(needs.exact(variant), node.kernel_driver)


def driver_compat(node: Node, variant: Variant) -> Gap:
    """Return how far off the kernel's branch is, and how many GPUs cuda-compat does not support."""
    branches = variant.driver.branches if variant.driver else ()
    own = node.kernel_driver and versions.branch(node.kernel_driver)
    apart = min((abs(branch - own) for branch in branches), default=FAR) if own else FAR
    return apart, sum(not verdicts.compat_supports(variant, gpu) for gpu in node.gpus)


def driver_gpu(node: Node, variant: Variant) -> Gap:
    """Return how many GPUs the driver left behind."""
    driver = needs.gpu_driver(variant) or node.kernel_driver
    return (len(verdicts.left_behind(node, driver)) if driver else FAR,)


def driver_cuda(node: Node, variant: Variant) -> Gap:
    """Return how much older the driver is than the oldest that would do."""
    lowest = cuda.lowest_driver(variant.cuda or "", variant.oldest_driver)
    return _between(verdicts.effective_driver(node, variant), lowest)


def device_code(node: Node, variant: Variant) -> Gap:
    """Return how many GPUs lack device code, and how far off the code is for the worst served."""
    driver = verdicts.effective_driver(node, variant)
    lacking = [gpu for gpu in node.gpus if verdicts.code(variant, gpu, driver) is None]
    return len(lacking), *max((_nearest_code(variant, gpu) for gpu in lacking), default=(FAR,))


def fatbin(node: Node, variant: Variant) -> Gap:
    """Return how much older the driver is than the first that reads compressed device code."""
    return _between(verdicts.effective_driver(node, variant), cuda.COMPRESSED_FATBIN_DRIVER)


def cpu(node: Node, variant: Variant) -> Gap:
    """Return how many flags the host lacks."""
    return (len(verdicts.missing_flags(node, variant)),)


def _nearest_code(variant: Variant, gpu: Gpu) -> Gap:
    targets = (*variant.cubins, *(ptx.target for ptx in variant.ptx))
    return min((_between(capability(target), gpu.compute) for target in targets), default=(FAR,))


def _between(one: str | None, other: str | None) -> Gap:
    if not one or not other:
        return (FAR,)
    return tuple(abs(a - b) for a, b in zip(versions.order(one), versions.order(other), strict=False))
