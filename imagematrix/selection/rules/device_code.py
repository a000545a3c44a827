"""`device-code`: there is device code for every GPU passed, and none goes unused without permission.

A GPU without code ends with CUDA error 209, PTX that is too new with 222. Sources:
https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/compute-capabilities.html,
https://docs.nvidia.com/cuda/parallel-thread-execution/.
"""

from __future__ import annotations

from imagematrix.catalog.catalog import UNKNOWN
from imagematrix.facts import cuda, versions
from imagematrix.facts.device_code import capability, cubin_runs, distance, ptx_runs
from imagematrix.gpus.spec import spec
from imagematrix.selection import drivers
from imagematrix.selection.rule import Rule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from imagematrix.catalog.catalog import Variant
    from imagematrix.node.host import Gpu
    from imagematrix.selection.rule import Gap, Reason
    from imagematrix.selection.target import Target

__all__ = ["RULE", "code", "need"]

CUBIN, PTX = 0, 1
SHOWN = 4  # items that a sentence lists before "and N more"
STATES = {
    "lost": "has fallen off the bus",
    "no-permission": "may not be opened by this user",
    "no-node": "has no device node",
    "no-module": "has no kernel module",
    "excluded": "is excluded from use by the driver",
    "vgpu-host": "is assigned to virtual machines",
    "failed": "could not be initialised by the driver, and NVML does not list it",
    "unconfirmed": "is confirmed neither by the driver nor by NVML",
    "mig-empty": "is in MIG mode and has no MIG device",
}


def need(variant: Variant) -> Hashable:
    """Return the device code, whether it is unknown, and the driver to load it."""
    return variant.gpu, variant.cubins, variant.ptx, _undecided(variant), drivers.own(variant)


def holds(target: Target, variant: Variant) -> bool:
    """Whether there is code for every GPU passed.

    A CPU-only image fits a target without accelerators, or one whose user allows that they go unused.
    """
    if not (variant.gpu or variant.cubins or variant.ptx):
        return target.allow_cpu or not (target.gpus or target.host.accelerators)
    driver = drivers.effective(target, variant)
    return bool(target.gpus) and all(_serves(variant, gpu, driver) for gpu in target.gpus)


def _undecided(variant: Variant) -> bool:
    """Whether the device code of an image is unknown: it may be compiled at run time."""
    return not variant.cubins and not variant.ptx and variant.source("cubins") == UNKNOWN


def _serves(variant: Variant, gpu: Gpu, driver: str | None) -> bool:
    """Whether there is code for a GPU, or the code is unknown and the GPU can be used."""
    return code(variant, gpu, driver) is not None or (_undecided(variant) and gpu.usable)


def code(variant: Variant, gpu: Gpu, driver: str | None) -> tuple[int, int] | None:
    """Return how well the variant's device code suits a GPU (less is better), or None if none of it runs.

    A cubin outranks PTX, and the nearest of several cubins decides.
    """
    compute = gpu.compute
    if compute is None or not gpu.usable:
        return None
    distances = [distance(cubin, compute) for cubin in variant.cubins if cubin_runs(cubin, compute)]
    if distances:
        return CUBIN, min(distances)
    for ptx in variant.ptx:
        if ptx_runs(ptx.target, compute) and _compiles(driver, ptx.isa):
            return PTX, 0
    return None


def reason(target: Target, variant: Variant, *, ok: bool) -> Reason:
    """Return need, have, why and fix."""
    wanted, have = _code(variant) or "no GPU", _computes(target.gpus)
    if ok and target.gpus and wanted != "no GPU":
        return wanted, have, "there is device code for every GPU passed", None
    if ok:
        return wanted, have, "the image has no device code, and needs none", None
    if wanted == "no GPU":
        why = f"the image has no device code and would leave accelerators unused: {_idle(target)}"
        return wanted, have, why, "pass --allow-cpu, or --gpus none"
    if not target.gpus:
        idle = _idle(target)
        suffix = f"; this host's accelerators cannot be passed: {idle}" if idle else ""
        why = f"the image needs a GPU, and none is passed{suffix}"
        return wanted, None, why, "run it on a node with a GPU, and pass one with --gpus"
    driver = drivers.effective(target, variant)
    lacking = _lacking(target, variant)
    why, fix = _lack(variant, lacking[0], driver)
    if len(lacking) < len(target.gpus):
        served = [gpu for gpu in target.gpus if _serves(variant, gpu, driver)]
        fix = f"pass --gpus {spec(served)}; or {fix}"
    return wanted, "; ".join(f"{gpu.label}: {gpu.compute or 'unknown'}" for gpu in lacking), why, fix


def gap(target: Target, variant: Variant) -> Gap:
    """Return how many GPUs lack device code, and the distance of the code for the worst match."""
    lacking = _lacking(target, variant)
    return len(lacking), *max((_nearest(variant, gpu) for gpu in lacking), default=(drivers.FAR,))


def _lacking(target: Target, variant: Variant) -> list[Gpu]:
    driver = drivers.effective(target, variant)
    return [gpu for gpu in target.gpus if not _serves(variant, gpu, driver)]


def _nearest(variant: Variant, gpu: Gpu) -> Gap:
    targets = (*variant.cubins, *(ptx.target for ptx in variant.ptx))
    return min((drivers.between(capability(one), gpu.compute) for one in targets), default=(drivers.FAR,))


def _compiles(driver: str | None, isa: str) -> bool:
    """Whether a driver compiles PTX of an ISA version. Minor-version compatibility does not cover this."""
    newest = cuda.ptx_isa(driver) if driver else None
    return newest is not None and versions.order(isa) <= versions.order(newest)


def _code(variant: Variant) -> str:
    """Return the variant's device code in words, or nothing for a CPU-only variant."""
    parts = [f"sm_{cubin}" for cubin in variant.cubins]
    parts += [f"PTX {ptx.target} (ISA {ptx.isa})" for ptx in variant.ptx]
    return ", ".join(parts) or ("device code" if variant.gpu else "")


def _computes(gpus: Iterable[Gpu]) -> str | None:
    return ", ".join(dict.fromkeys(gpu.compute or "unknown" for gpu in gpus)) or None


def _idle(target: Target) -> str:
    """Return what an image without device code would leave unused, in words."""
    words = [gpu.label if gpu.usable else f"{gpu.label} (state {gpu.state})" for gpu in target.gpus]
    words += [accelerator.label for accelerator in target.host.accelerators]
    more = f"; and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return f"{'; '.join(words[:SHOWN])}{more}"


def _lack(variant: Variant, gpu: Gpu, driver: str | None) -> tuple[str, str]:
    """Return why none of the variant's code runs on `gpu`, and what would change it."""
    if not gpu.usable:
        state = STATES.get(gpu.state, f"is in the state {gpu.state}")
        return f"{gpu.label} {state}", "see the warnings of `imagematrix probe`"
    if gpu.compute is None:
        return f"the compute capability of {gpu.label} is unknown", "probe the host with NVML"
    fix = f"add compute {gpu.compute} to the matrix"
    for ptx in variant.ptx:
        if ptx_runs(ptx.target, gpu.compute):
            newest = cuda.ptx_isa(driver) if driver else None
            limit = f"driver {driver} compiles up to {newest}" if newest else "the driver's limit is unknown"
            return f"for {gpu.label} the image has only PTX of ISA {ptx.isa}, and {limit}", fix
    return f"no device code in the image runs on {gpu.label}, compute capability {gpu.compute}", fix


RULE = Rule(
    name="device-code",
    facts=("driver.version", "gpus.compute", "gpus.state", "accelerators"),
    parts=("cubins", "ptx"),
    fact="cubins",
    need=need,
    holds=holds,
    reason=reason,
    gap=gap,
)
