"""`nvidia-require`: the host meets the conditions in the image's variables NVIDIA_REQUIRE_*.

Otherwise NVIDIA's runtime refuses to start it, unless it uses CDI. Conditions on GPUs matter if some are
passed, and conditions on the driver if one is loaded. Source:
https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/docker-specialized.html.
"""

from __future__ import annotations

from functools import partial

from imagematrix.hardware.vendors import cuda
from imagematrix.selection.rule import Rule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable

    from imagematrix.hardware.host.host import Gpu
    from imagematrix.hardware.vendors.requirements import Condition
    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.rule import Distance, Reason, Thresholds
    from imagematrix.selection.selection_target import Target

FACTS = {"cuda": "driver.version", "driver": "driver.version", "arch": "gpus.compute", "brand": "gpus.brand"}


def need(variant: Variant) -> Hashable:
    """Return the expressions, or None."""
    return variant.requires or None


def is_satisfied(target: Target, variant: Variant) -> bool:
    """Whether every expression holds for every GPU passed."""
    return not _find_unmet(target, variant)


def thresholds(variant: Variant) -> Thresholds:
    """Return the values in the conditions; those on CUDA are conditions on the driver that supports it."""
    from imagematrix.hardware.vendors import requirements

    def is_met(condition: Condition, release: str | None) -> bool:
        return release is not None and condition.is_met(release)

    thresholds: dict[str, list[str]] = {}
    for condition in requirements.list_conditions(variant.requires):
        values: tuple[str, ...] = (condition.value,)
        if condition.name == "cuda":
            # The first drivers of the releases at which the condition gives another verdict.
            values = cuda.find_verdict_bounds(partial(is_met, condition))
        thresholds.setdefault(FACTS[condition.name], []).extend(values)
    return thresholds


def reason(target: Target, variant: Variant, *, ok: bool) -> Reason:
    """Return need, have, why and advice."""
    wanted = " and ".join(variant.requires)
    if ok:
        return wanted, _describe_host(target, None), "the host meets the image's requirements", None
    gpu, expression = _find_unmet(target, variant)[0]
    why = f"the image requires {expression}; the host has {_describe_host(target, gpu)}"
    return wanted, _describe_host(target, gpu), why, "use an image without this condition, or another node"


def distance(target: Target, variant: Variant) -> Distance:
    """Return how many conditions are unmet, over all GPUs."""
    return (len(_find_unmet(target, variant)),)


def _find_unmet(target: Target, variant: Variant) -> list[tuple[Gpu | None, str]]:
    """Return the expressions that do not hold, each with the GPU in question, if there is one."""
    from imagematrix.hardware.vendors import requirements  # few variants have requirements

    gpus: tuple[Gpu | None, ...] = target.gpus or (None,)
    return [
        (gpu, expression)
        for gpu in gpus
        for expression in variant.requires
        if not requirements.is_met(requirements.parse_requirement(expression), partial(_is_met, target, gpu))
    ]


def _is_met(target: Target, gpu: Gpu | None, condition: Condition) -> bool:
    """Whether a condition is met, or is on what is absent. An unknown fact of what is there meets none."""
    about = gpu if FACTS[condition.name].startswith("gpus.") else target.host.driver
    if about is None:
        return True
    have = _get_value(target, gpu, condition.name)
    return have is not None and condition.is_met(have)


def _get_value(target: Target, gpu: Gpu | None, name: str) -> str | None:
    """Return what the host has of what a condition names; None if it is unknown."""
    driver = target.kernel_driver if name in ("cuda", "driver") else None
    if name == "cuda":
        return cuda.get_newest_cuda(driver) if driver else None
    if name == "driver" or gpu is None:
        return driver
    return gpu.compute if name == "arch" else gpu.brand


def _describe_host(target: Target, gpu: Gpu | None) -> str:
    values = ((name, _get_value(target, gpu, name)) for name in FACTS)
    return " ".join(f"{name}={value}" for name, value in values if value)


RULE = Rule(
    name="nvidia-require",
    facts=("driver.version", "gpus.compute", "gpus.brand"),
    parts=("requires",),
    fact="requires",
    need=need,
    is_satisfied=is_satisfied,
    thresholds=thresholds,
    reason=reason,
    distance=distance,
)
