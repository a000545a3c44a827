"""`nvidia-require`: the host meets the conditions in the image's variables NVIDIA_REQUIRE_*.

Otherwise NVIDIA's runtime refuses to start it, unless it uses CDI. Source:
https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/docker-specialized.html.
"""

from __future__ import annotations

from imagematrix.facts import cuda
from imagematrix.selection.rule import Rule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable

    from imagematrix.catalog.catalog import Variant
    from imagematrix.node.host import Gpu
    from imagematrix.selection.rule import Gap, Reason
    from imagematrix.selection.target import Target

__all__ = ["RULE"]


def need(variant: Variant) -> Hashable:
    """Return the expressions, or None."""
    return variant.requires or None


def holds(target: Target, variant: Variant) -> bool:
    """Whether every expression holds for every GPU passed."""
    return not _unmet(target, variant)


def reason(target: Target, variant: Variant, *, ok: bool) -> Reason:
    """Return need, have, why and fix."""
    wanted = " and ".join(variant.requires)
    if ok:
        return wanted, _have(target, None), "the host meets the image's requirements", None
    gpu, expression = _unmet(target, variant)[0]
    why = f"the image requires {expression}; the host has {_have(target, gpu)}"
    return wanted, _have(target, gpu), why, "use an image without this condition, or another node"


def gap(target: Target, variant: Variant) -> Gap:
    """Return how many conditions are unmet, over all GPUs."""
    return (len(_unmet(target, variant)),)


def _unmet(target: Target, variant: Variant) -> list[tuple[Gpu | None, str]]:
    """Return the expressions that do not hold, each with the GPU in question, if there is one."""
    from imagematrix.facts import requirements  # few variants have requirements

    gpus: tuple[Gpu | None, ...] = target.gpus or (None,)
    return [
        (gpu, expression)
        for gpu in gpus
        for expression in variant.requires
        if not requirements.holds(requirements.parse(expression), _values(target, gpu))
    ]


def _values(target: Target, gpu: Gpu | None) -> dict[str, str | None]:
    driver = target.kernel_driver
    return {
        "cuda": cuda.driver_cuda(driver) if driver else None,
        "driver": driver,
        "arch": gpu.compute if gpu else None,
        "brand": gpu.brand if gpu else None,
    }


def _have(target: Target, gpu: Gpu | None) -> str:
    return " ".join(f"{name}={value}" for name, value in _values(target, gpu).items() if value)


RULE = Rule(
    name="nvidia-require",
    facts=("driver.version", "gpus.compute", "gpus.brand"),
    parts=("requires",),
    fact="requires",
    need=need,
    holds=holds,
    reason=reason,
    gap=gap,
)
