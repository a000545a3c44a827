"""`driver-compat`: the cuda-compat package in the image supports the kernel module's branch and every GPU.

Otherwise CUDA ends with error 803 or 804. Source:
https://docs.nvidia.com/deploy/cuda-compatibility/forward-compatibility.html.
"""

from __future__ import annotations

from imagematrix.hardware.vendors import versions
from imagematrix.selection import drivers
from imagematrix.selection.rule import Rule
from imagematrix.selection.selection_target import VIRTUAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable

    from imagematrix.hardware.host.host import Gpu
    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.rule import Distance, Reason, Thresholds
    from imagematrix.selection.selection_target import Target


def need(variant: Variant) -> Hashable:
    """Return the cuda-compat, or None."""
    return variant.driver if variant.driver and variant.driver.mode == "compat" else None


def is_satisfied(target: Target, variant: Variant) -> bool:
    """Whether cuda-compat supports the kernel's branch, is newer than its driver, and supports every GPU."""
    kernel, compat = target.kernel_driver, variant.driver
    if kernel is None or compat is None or compat.version is None:
        return False
    return (
        # NVIDIA's container toolkit compares branch and version likewise (cmd/nvidia-cdi-hook/cudacompat).
        not (versions.is_tegra(kernel) or target.virtual)
        and versions.get_branch(kernel) in compat.branches
        and versions.make_sort_key(compat.version) > versions.make_sort_key(kernel)
        and all(_supports_gpu(variant, gpu) for gpu in target.gpus)
    )


def thresholds(variant: Variant) -> Thresholds:
    """Return the version and the bounds of the branches, and the brands of GPUs that are supported."""
    branches, brands = (variant.driver.branches, variant.driver.brands) if variant.driver else ((), ())
    return {
        "driver.version": filter(
            None, [drivers.get_baked_driver(variant), *drivers.get_branch_bounds(branches)]
        ),
        "gpus.state": (VIRTUAL,),
        "gpus.brand": brands,
        "gpus.data_centre": (True,),
    }


def reason(target: Target, variant: Variant, *, ok: bool) -> Reason:
    """Return need, have, why and advice."""
    compat, have = drivers.get_baked_driver(variant), target.kernel_driver
    branches = ", ".join(str(branch) for branch in variant.driver.branches) if variant.driver else ""
    wanted = f"a kernel driver older than {compat}, of branch {branches or 'none'}, and data-centre GPUs"
    if ok:
        return wanted, have, f"cuda-compat {compat} supports the kernel's driver and the GPUs", None
    if have is None:
        return wanted, have, drivers.NO_DRIVER, f"load an NVIDIA driver of branch {branches}"
    if target.virtual:
        return wanted, have, drivers.explain_vgpu(target), drivers.OTHER
    unsupported = [gpu.label for gpu in target.gpus if not _supports_gpu(variant, gpu)]
    if unsupported:
        labels = drivers.join_words(unsupported)
        why = f"cuda-compat is not supported on {labels}, as far as brand and name tell"
    else:
        why = f"cuda-compat {compat} does not support kernel driver {have}: only an older one of its branches"
    return wanted, have, why, drivers.OTHER


def distance(target: Target, variant: Variant) -> Distance:
    """Return how far off the kernel's branch is, and how many GPUs cuda-compat does not support."""
    branches = variant.driver.branches if variant.driver else ()
    loaded = target.kernel_driver and versions.get_branch(target.kernel_driver)
    distance = drivers.FAR
    if loaded:
        distance = min((abs(branch - loaded) for branch in branches), default=drivers.FAR)
    return distance, sum(not _supports_gpu(variant, gpu) for gpu in target.gpus)


def _supports_gpu(variant: Variant, gpu: Gpu) -> bool:
    """Whether cuda-compat supports a GPU: its ELF note lists the brand, and it is a data-centre part."""
    brands = variant.driver.brands if variant.driver else ()
    # The note also lists brands of which NVIDIA supports only some boards, such as RTX.
    return gpu.brand in brands and gpu.data_centre


RULE = Rule(
    name="driver-compat",
    facts=("driver.version", "gpus.state", "gpus.brand", "gpus.name"),
    parts=("driver",),
    fact="driver",
    need=need,
    is_satisfied=is_satisfied,
    thresholds=thresholds,
    reason=reason,
    distance=distance,
)
