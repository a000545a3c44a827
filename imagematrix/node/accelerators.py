"""NVIDIA's driver, GPUs and device nodes of a host, from all that tells of them."""

from __future__ import annotations

from imagematrix.node import gpus, nvidia
from imagematrix.node.host import Driver

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from imagematrix.node.host import Gpu
    from imagematrix.node.nvidia import Kernel
    from imagematrix.node.nvml import Nvml
    from imagematrix.node.pci import Function
    from imagematrix.node.tree import Tree

__all__ = ["UNASKED", "Dump", "find"]

Dump = tuple["Driver | None", "tuple[Gpu, ...]", "tuple[str, ...]"]
Found = tuple["Driver | None", "tuple[Gpu, ...]", "tuple[str, ...]", "list[str]"]

NEEDED = ("/dev/nvidiactl", "/dev/nvidia-uvm")  # beside each GPU's own node, for any use of CUDA
SANDBOX = (
    "the kernel shows no NVIDIA module, as in a sandbox (gVisor): of the driver and the GPUs only what NVML "
    "says is known"
)
UNASKED = (
    "NVML was not asked, so the memory and MIG mode of the GPUs are not known, and the brand of data-centre "
    "parts only; a dump of `nvidia-smi -q -x` tells them"
)


def find(
    tree: Tree, functions: tuple[Function, ...], dump: Dump | None, ask: Callable[[], Nvml] | None
) -> Found:
    """Return the driver, the GPUs, the device nodes, and sentences about what is wrong or unknown.

    `functions` are those on the PCI bus. Of `dump` and `ask`, see `imagematrix.node.probe.assemble`, one at
    most is there; `ask` is called.
    """
    warnings: list[str] = []
    kernel = nvidia.read(tree, functions)
    if dump is not None:
        driver, found = _dumped(dump, kernel, warnings)
        warnings += gpus.remarks(found, kernel, complete=True)
        return driver, found, nvidia.nodes(tree) or (), warnings
    answer = ask() if ask else None
    nodes = nvidia.nodes(tree)  # only now: NVML makes those that are missing
    driver = _driver(kernel, answer, warnings)
    found, withheld = gpus.join(tree, kernel, nodes, answer)
    if withheld:
        warnings.append(f"{', '.join(withheld)}: not given to this container or job, and left out")
    if answer is not None and answer.message:
        from imagematrix.node.nvml import explain

        warnings.append(explain(answer, driver))
    elif answer is None and kernel.loaded and found:
        warnings.append(UNASKED)
    complete = answer is not None and not answer.message
    warnings += gpus.remarks(found, kernel, complete=complete)
    if driver is not None and not kernel.loaded:
        warnings.append(SANDBOX)
    if driver is not None or kernel.loaded:
        warnings += _surroundings(found, nodes)
    return driver, found, nodes or (), warnings


def _dumped(dump: Dump, kernel: Kernel, warnings: list[str]) -> tuple[Driver | None, tuple[Gpu, ...]]:
    driver, found, remarks = dump
    warnings += remarks
    if kernel.driver is None or driver is None:
        return driver, found
    if kernel.driver.version == driver.version:
        return kernel.driver, found  # it tells the kind of module too
    warnings.append(
        f"the nvidia-smi dump is of driver {driver.version}, while {kernel.driver.source} says "
        f"{kernel.driver.version}: the dump's was taken, and the CPU may be another host's"
    )
    return driver, found


def _driver(kernel: Kernel, answer: Nvml | None, warnings: list[str]) -> Driver | None:
    told = answer.driver if answer and nvidia.is_version(answer.driver or "") else None
    if kernel.driver is None:
        return Driver(version=told, kind=None, source="NVML") if told else None
    if told and told != kernel.driver.version:
        warnings.append(
            f"NVML says that the driver is {told}, but {kernel.driver.source} says {kernel.driver.version}, "
            f"which is what counts"
        )
    return kernel.driver


def _surroundings(found: tuple[Gpu, ...], nodes: tuple[str, ...] | None) -> list[str]:
    if not found:
        return ["the nvidia module is loaded, but no GPU was found, neither on the PCI bus nor by it"]
    if nodes is None:
        return ["the captured tree has no dev folder, so the device nodes are not known"]
    missing = [node for node in NEEDED if node not in nodes]
    if not missing:
        return []
    return [f"CUDA can't start without {' and '.join(missing)}; `nvidia-modprobe -u -c 0` makes them"]
