"""`memory`: every GPU passed, MIG device or share of one has the memory that the variant states, in total.

Otherwise the program ends when an allocation fails, often only after minutes. A GPU whose memory is unknown
is refused. Sizes are those that NVML reports, which are below what a card is sold with. Source:
https://docs.nvidia.com/deploy/nvml-api/structnvmlMemory__v2__t.html.
"""

from __future__ import annotations

from imagematrix.selection.rule import Rule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.hardware.host.host import Gpu
    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.rule import Distance, Reason, Thresholds
    from imagematrix.selection.selection_target import Target

UNKNOWN_FIX = (
    "let NVML report it: install libnvidia-ml.so.1 of the driver, or pass the output of `nvidia-smi -q -x` "
    "to `imagematrix probe --nvidia-smi FILE`"
)


def need(variant: Variant) -> int | None:
    """Return the MiB that each GPU needs, or None if the variant states nothing."""
    return variant.gpu_memory_mib


def is_satisfied(target: Target, variant: Variant) -> bool:
    """Whether every GPU passed is known to have that much."""
    return all(_measure_shortage(target, gpu, variant) == 0 for gpu in target.gpus)


def thresholds(variant: Variant) -> Thresholds:
    """Return the least memory that is enough."""
    return {"gpus.least_memory_mib": (_get_need(variant),)}


def reason(target: Target, variant: Variant, *, ok: bool) -> Reason:
    """Return need, have, why and advice."""
    wanted = _get_need(variant)
    sizes = {gpu: _get_memory(target, gpu) for gpu in target.gpus}
    known = [size for size in sizes.values() if size is not None]
    need_text = f"{wanted} MiB"
    have = f"{min(known)} MiB" if known else None
    if ok:
        return need_text, have, f"every GPU that is passed has {wanted} MiB of memory or more", None
    unknown = [gpu for gpu, size in sizes.items() if size is None]
    if unknown:
        why = f"it needs {wanted} MiB of GPU memory, and the memory of {unknown[0].label} is unknown"
        return need_text, None, why, UNKNOWN_FIX
    smallest = min(sizes, key=lambda gpu: sizes[gpu] or 0)
    if target.vram_mib is not None and target.vram_mib < wanted <= (smallest.least_memory_mib or wanted):
        why = f"it needs {wanted} MiB of GPU memory, and the share has {target.vram_mib} MiB"
        return need_text, have, why, f"pass --vram {wanted}Mi or more"
    why = f"it needs {wanted} MiB of GPU memory, and {smallest.label} has {sizes[smallest]} MiB"
    return need_text, have, why, "pass a GPU with more memory, or build a variant that needs less"


def distance(target: Target, variant: Variant) -> Distance:
    """Return how many MiB the GPU with the least memory lacks."""
    return (max(_measure_shortage(target, gpu, variant) for gpu in target.gpus),)


def _get_need(variant: Variant) -> int:
    return variant.gpu_memory_mib or 0


def _get_memory(target: Target, gpu: Gpu) -> int | None:
    """Return the MiB that a container gets of a GPU: all, or the share of it that is asked for."""
    total, share = gpu.least_memory_mib, target.vram_mib
    if share is None:
        return total
    return share if total is None else min(total, share)  # a claim refuses to share what is unknown


def _measure_shortage(target: Target, gpu: Gpu, variant: Variant) -> int:
    """Return how many MiB a GPU lacks; of one with unknown memory, all that is needed."""
    return max(0, _get_need(variant) - (_get_memory(target, gpu) or 0))


RULE = Rule(
    name="memory",
    facts=("gpus.least_memory_mib",),
    parts=("axes", "gpu_memory_mib"),
    fact="memory",
    need=need,
    is_satisfied=is_satisfied,
    thresholds=thresholds,
    reason=reason,
    distance=distance,
)
