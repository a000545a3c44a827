"""What each rule says about a variant: the need, what the node has, one sentence why, and the nearest cure.

Every function takes the verdict, and returns need, have, why and fix; the fix is None where the rule holds.
"""

from __future__ import annotations

from imagematrix.facts import cuda, marches, versions
from imagematrix.facts.device_code import ptx_runs
from imagematrix.gpus.spec import spec
from imagematrix.selection import needs, verdicts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Protocol

    from imagematrix.catalog.catalog import Variant
    from imagematrix.node.host import Gpu
    from imagematrix.selection.node import Node

    Reason = tuple[str, str | None, str, str | None]

    class Tell(Protocol):
        """One of the functions below."""

        def __call__(self, node: Node, variant: Variant, *, ok: bool) -> Reason:
            """Tell about a variant whose verdict is `ok`."""


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

SHOWN = 4  # things in a sentence before how many more there are
NO_DRIVER = "no NVIDIA kernel module is loaded, or its version could not be read"
STATES = {
    "lost": "has fallen off the bus",
    "no-permission": "may not be opened by this user",
    "no-node": "has no device node",
    "no-module": "has no kernel module",
    "excluded": "is excluded from use by the driver",
    "vgpu-host": "is given out to virtual machines",
    "failed": "could not be set up by the driver, and NVML leaves it out",
    "unconfirmed": "is confirmed neither by the driver nor by NVML",
    "mig-empty": "is in MIG mode and has no MIG device",
}


def platform(node: Node, variant: Variant, *, ok: bool) -> Reason:
    """Tell about the CPU architecture."""
    if ok:
        return variant.platform, node.platform, "the image is for the host's CPU architecture", None
    why = f"its programs are for {variant.platform}, and the host executes {node.platform}"
    return variant.platform, node.platform, why, f"build a variant for {node.platform}"


def driver_exact(node: Node, variant: Variant, *, ok: bool) -> Reason:
    """Tell about a baked driver; another version ends in NVML error 18 or CUDA error 803."""
    need, have = _baked(variant), node.kernel_driver
    if ok:
        return need, have, "the driver in the image is the one that the kernel has loaded", None
    if have is None:
        return need, have, NO_DRIVER, f"load the NVIDIA driver {need}"
    if node.virtual:
        return need, have, *_own_driver(node)
    why = f"the image carries driver {need}, which talks to its own kernel module only; the host has {have}"
    return need, have, why, _with_driver(node, have)


def driver_compat(node: Node, variant: Variant, *, ok: bool) -> Reason:
    """Tell about a baked cuda-compat; where it does not fit, CUDA ends with error 803 or 804."""
    compat, have = _baked(variant), node.kernel_driver
    branches = ", ".join(str(branch) for branch in variant.driver.branches) if variant.driver else ""
    need = f"a kernel driver older than {compat}, of branch {branches or 'none'}, and data-centre GPUs"
    if ok:
        return need, have, f"cuda-compat {compat} supports the kernel's driver and the GPUs", None
    if have is None:
        return need, have, NO_DRIVER, f"load an NVIDIA driver of branch {branches}"
    if node.virtual:
        return need, have, *_own_driver(node)
    unsupported = [gpu.label for gpu in node.gpus if not verdicts.compat_supports(variant, gpu)]
    if unsupported:
        why = f"cuda-compat is not supported on {_listed(unsupported)}, as far as brand and name tell"
    else:
        why = f"cuda-compat {compat} does not support kernel driver {have}: only an older one of its branches"
    return need, have, why, _with_driver(node, have)


def driver_gpu(node: Node, variant: Variant, *, ok: bool) -> Reason:
    """Tell about GPUs that newer drivers dropped; the driver then finds no device (CUDA error 100).

    The kernel's kind of module is told of here as well: the open one drives Turing and newer GPUs, the
    proprietary one none from Blackwell on.
    """
    driver = needs.gpu_driver(variant) or node.kernel_driver
    need = "a driver that supports every GPU passed"
    if ok:
        return need, driver, f"driver {driver} is not known to have dropped a GPU that is passed", None
    if driver is None:
        return need, driver, NO_DRIVER, "load an NVIDIA driver"
    if left := verdicts.left_behind(node, driver):
        last = min(filter(None, map(verdicts.last_branch, left)))
        labels = _listed([gpu.label for gpu in left])
        why = f"driver {driver} does not support {labels}: branch {last} is the last that does"
        return f"a driver of branch {last} or older", driver, why, _older(node, last)
    kind = node.host.driver.kind if node.host.driver else None
    labels = _listed([gpu.label for gpu in verdicts.undriven(node)])
    why = f"the {kind} kernel modules of NVIDIA's driver do not drive {labels}"
    other = "proprietary" if kind == "open" else "open"
    return f"the {other} kernel modules", f"{driver} ({kind})", why, f"install the {other} kernel modules"


def driver_cuda(node: Node, variant: Variant, *, ok: bool) -> Reason:
    """Tell about the CUDA release; a driver too old for it ends with error 35."""
    need, driver = f"CUDA {variant.cuda}", verdicts.effective_driver(node, variant)
    if driver is None:
        return need, None, NO_DRIVER, f"load an NVIDIA driver that runs {need}"
    have = f"{driver} (CUDA {cuda.driver_cuda(driver) or 'unknown'})"
    if ok:
        return need, have, f"driver {driver} runs {need}", None
    if versions.is_tegra(driver):
        why = f"driver {driver} is a Tegra's, whose CUDA is that of its JetPack, and is not known"
        return need, have, why, "use a container made for this JetPack"
    lowest = cuda.lowest_driver(variant.cuda or "", variant.oldest_driver)
    if lowest is None:
        why = f"this release of imagematrix does not know which drivers run {need}"
        return need, have, why, "use a newer release of imagematrix"
    return need, have, f"driver {driver} is too old for {need}", _newer(variant, lowest)


def device_code(node: Node, variant: Variant, *, ok: bool) -> Reason:
    """Tell about device code; a GPU without any ends with error 209, PTX that is too new with 222."""
    need = _code(variant) or "no GPU"
    if ok and node.gpus and need != "no GPU":
        return need, _computes(node.gpus), "there is device code for every GPU passed", None
    if ok:
        return need, _computes(node.gpus), "the image has no device code and may leave GPUs unused", None
    if need == "no GPU":
        why = f"the image has no device code, and would leave unused what this host has: {_some(node.idle)}"
        return need, _computes(node.gpus), why, "pass --allow-cpu, or --gpus none"
    if not node.gpus:
        seen = f"; what this host has can't be passed: {_some(node.idle)}" if node.idle else ""
        why = f"the image is for GPUs and none is passed to it{seen}"
        return need, None, why, "run it on a node with a GPU, and pass one with --gpus"
    driver = verdicts.effective_driver(node, variant)
    served = [gpu for gpu in node.gpus if verdicts.code(variant, gpu, driver) is not None]
    lacking = [gpu for gpu in node.gpus if gpu not in served]
    why, fix = _lack(variant, lacking[0], driver)
    if served:
        fix = f"pass --gpus {spec(served)}; or {fix}"
    return need, "; ".join(f"{gpu.label}: {gpu.compute or 'unknown'}" for gpu in lacking), why, fix


def fatbin(node: Node, variant: Variant, *, ok: bool) -> Reason:
    """Tell about compressed fatbins; an older driver calls them an invalid device kernel image."""
    need, driver = f"{cuda.COMPRESSED_FATBIN_DRIVER} or newer", verdicts.effective_driver(node, variant)
    if ok:
        return need, driver, "the driver reads compressed device code", None
    why = f"driver {driver} cannot read compressed device code" if driver else NO_DRIVER
    return need, driver, why, _newer(variant, cuda.COMPRESSED_FATBIN_DRIVER)


def cpu(node: Node, variant: Variant, *, ok: bool) -> Reason:
    """Tell about CPU flags; code that needs one the host lacks ends with SIGILL, exit 132."""
    need = " ".join(sorted(verdicts.needed_flags(node, variant))) or "no flags"
    if ok:
        return need, "all of them", "the CPUs have every flag that the code needs", None
    if not node.host.cpu.flags:
        return need, None, "the flags of the host's CPUs could not be read", "probe the host again"
    missing = " ".join(verdicts.missing_flags(node, variant))
    level = marches.level(node.host.cpu.flags)
    fix = f"build a variant for march {level}" if level else f"build a variant that needs no {missing}"
    return need, f"all but {missing}", f"the host's CPUs lack {missing}, which the code needs", fix


def _baked(variant: Variant) -> str:
    return (variant.driver and variant.driver.version) or ""


def _with_driver(node: Node, kernel: str) -> str:
    """Return what to do about a driver in an image that the kernel's does not go with."""
    left = verdicts.left_behind(node, kernel)
    if left:
        return _older(node, min(filter(None, map(verdicts.last_branch, left))))
    return f"build a variant with driver {kernel}"


def _older(node: Node, last: int) -> str:
    """Return what to do where a driver dropped a GPU that branch `last` was the last to support."""
    kernel = node.kernel_driver
    if kernel is not None and verdicts.left_behind(node, kernel):
        return f"keep this host at a driver of branch {last} or older"
    return f"build a variant with a driver of branch {last} or older, or with none of its own (driver: host)"


def _newer(variant: Variant, driver: str) -> str:
    own = needs.own_driver(variant)
    return f"build a variant with cuda-compat {driver} or newer" if own else f"driver {driver} or newer"


def _code(variant: Variant) -> str:
    """Return the variant's device code in words, or nothing for a CPU-only variant."""
    parts = [f"sm_{cubin}" for cubin in variant.cubins]
    parts += [f"PTX {ptx.target} (ISA {ptx.isa})" for ptx in variant.ptx]
    return ", ".join(parts) or ("device code" if variant.gpu else "")


def _computes(gpus: Iterable[Gpu]) -> str | None:
    return ", ".join(dict.fromkeys(gpu.compute or "unknown" for gpu in gpus)) or None


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
            able = (
                f"driver {driver} compiles up to {newest}"
                if newest
                else "what the driver compiles is unknown"
            )
            return f"for {gpu.label} the image has only PTX of ISA {ptx.isa}, and {able}", fix
    return f"no device code in the image runs on {gpu.label}, compute capability {gpu.compute}", fix


def _own_driver(node: Node) -> tuple[str, str]:
    labels = _listed([gpu.label for gpu in node.virtual])
    why = f"{labels}: a virtual GPU needs the driver of its vGPU release, which its node brings"
    return why, "build a variant with no driver of its own (driver: host)"


def _some(words: tuple[str, ...]) -> str:
    more = f"; and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return f"{'; '.join(words[:SHOWN])}{more}"


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
