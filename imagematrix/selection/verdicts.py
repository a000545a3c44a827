"""When a variant fits a node: one pure yes or no for each rule, and what they are made of.

A rule is only asked about variants it applies to (`imagematrix.selection.rules` says which). What is not
known never counts in favour of a variant. What breaks where a rule does not hold is told in
`imagematrix.selection.reasons`.
"""

from __future__ import annotations

from imagematrix.facts import cuda, gpus, marches, versions
from imagematrix.facts.device_code import cubin_runs, distance, ptx_runs
from imagematrix.selection import needs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.catalog.catalog import Variant
    from imagematrix.node.host import Gpu
    from imagematrix.selection.node import Node

__all__ = [
    "code",
    "compat_supports",
    "compiles",
    "cpu",
    "device_code",
    "driver_compat",
    "driver_cuda",
    "driver_exact",
    "driver_gpu",
    "effective_driver",
    "fatbin",
    "last_branch",
    "left_behind",
    "missing_flags",
    "needed_flags",
    "platform",
    "undriven",
]

CUBIN, PTX = 0, 1


def effective_driver(node: Node, variant: Variant) -> str | None:
    """Return the driver that decides about CUDA: the user-mode one in mode compat, else the kernel's."""
    return needs.own_driver(variant) or node.kernel_driver


def platform(node: Node, variant: Variant) -> bool:
    """Whether the image is for this CPU architecture. Its variants (amd64/v3) are for the rule `cpu`."""
    return variant.platform == node.platform or variant.platform.startswith(f"{node.platform}/")


def driver_exact(node: Node, variant: Variant) -> bool:
    """Whether the baked driver is the kernel's, as the kernel compares them: the whole string.

    A virtual GPU needs the driver of its vGPU release, which only its node has.
    """
    kernel = node.kernel_driver
    return kernel is not None and needs.exact(variant) == kernel and not node.virtual


def driver_compat(node: Node, variant: Variant) -> bool:
    """Whether cuda-compat supports the kernel's branch, is newer than its driver, and supports every GPU."""
    kernel, compat = node.kernel_driver, variant.driver
    if kernel is None or compat is None or compat.version is None:
        return False
    return (
        not (versions.is_tegra(kernel) or node.virtual)
        and versions.branch(kernel) in compat.branches
        and versions.order(compat.version) > versions.order(kernel)
        and all(compat_supports(variant, gpu) for gpu in node.gpus)
    )


def compat_supports(variant: Variant, gpu: Gpu) -> bool:
    """Whether cuda-compat supports a GPU: its brand is in the note's list, and it is a data-centre part."""
    brands = variant.driver.brands if variant.driver else ()
    return gpu.brand in brands and gpus.data_centre(gpu.brand, gpu.name)


def driver_gpu(node: Node, variant: Variant) -> bool:
    """Whether the user-mode driver still supports every GPU, and the kind of kernel module drives it."""
    driver = needs.gpu_driver(variant) or node.kernel_driver
    return driver is not None and not left_behind(node, driver) and not undriven(node)


def left_behind(node: Node, driver: str) -> list[Gpu]:
    """Return the GPUs passed that `driver` no longer supports."""
    own = versions.branch(driver)
    return [gpu for gpu in node.gpus if (last := last_branch(gpu)) is not None and last < own]


def last_branch(gpu: Gpu) -> int | None:
    """Return the last driver branch that supports a GPU; None where the newest does or nothing is known."""
    return gpus.last_branch(gpu.pci_device_id, gpu.compute)


def undriven(node: Node) -> list[Gpu]:
    """Return the GPUs passed that kernel modules of the kind that is loaded, open or not, do not drive."""
    driver = node.host.driver
    return [gpu for gpu in node.gpus if driver and not gpus.drives(driver.kind, gpu.compute)]


def driver_cuda(node: Node, variant: Variant) -> bool:
    """Whether the effective driver runs the variant's CUDA release."""
    driver = effective_driver(node, variant)
    if driver is None or variant.cuda is None:
        return False
    return cuda.driver_runs(variant.cuda, driver, variant.oldest_driver)


def device_code(node: Node, variant: Variant) -> bool:
    """Whether there is code for every GPU passed.

    A CPU-only image wants a node that has nothing of an accelerator, or leave to ignore what it has.
    """
    if not (variant.gpu or variant.cubins or variant.ptx):
        return node.allow_cpu or not (node.gpus or node.host.accelerators)
    driver = effective_driver(node, variant)
    return bool(node.gpus) and all(code(variant, gpu, driver) is not None for gpu in node.gpus)


def code(variant: Variant, gpu: Gpu, driver: str | None) -> tuple[int, int] | None:
    """Return how well the variant's device code suits a GPU (less is better), or None where none of it runs.

    A cubin goes before PTX, and the nearest of several cubins decides.
    """
    compute = gpu.compute
    if compute is None or not gpu.usable:
        return None
    distances = [distance(cubin, compute) for cubin in variant.cubins if cubin_runs(cubin, compute)]
    if distances:
        return CUBIN, min(distances)
    for ptx in variant.ptx:
        if ptx_runs(ptx.target, compute) and compiles(driver, ptx.isa):
            return PTX, 0
    return None


def compiles(driver: str | None, isa: str) -> bool:
    """Whether a driver compiles PTX of an ISA version. Minor-version compatibility does not cover this."""
    newest = cuda.ptx_isa(driver) if driver else None
    return newest is not None and versions.order(isa) <= versions.order(newest)


def fatbin(node: Node, variant: Variant) -> bool:
    """Whether the effective driver reads compressed fatbins."""
    driver = effective_driver(node, variant)
    if driver is None or versions.is_tegra(driver):
        return False
    return versions.order(driver) >= versions.order(cuda.COMPRESSED_FATBIN_DRIVER)


def cpu(node: Node, variant: Variant) -> bool:
    """Whether the host's CPUs have every flag that the code needs. Flags are compared, never names."""
    return needed_flags(node, variant) <= node.host.cpu.flags


def needed_flags(node: Node, variant: Variant) -> frozenset[str]:
    """Return the flags that the code needs, without those that user code never depends on.

    Labels have listed the flags for signing return addresses of every march that has them: they count where
    a label says that the code does sign.
    """
    needed = variant.cpu_flags - marches.IGNORED.get(node.host.arch, frozenset())
    return needed | marches.SIGNING if variant.signed_returns else needed


def missing_flags(node: Node, variant: Variant) -> list[str]:
    """Return the flags that the code needs and the host lacks, sorted."""
    return sorted(needed_flags(node, variant) - node.host.cpu.flags)
