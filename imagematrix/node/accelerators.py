"""NVIDIA's driver, GPUs and device nodes of a host, from all sources."""

from __future__ import annotations

from imagematrix.node import fabric, gpus, nvidia
from imagematrix.node.host import Driver

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from imagematrix.node.host import Gpu
    from imagematrix.node.nvidia import Kernel
    from imagematrix.node.nvml import Nvml
    from imagematrix.node.pci import Function
    from imagematrix.node.tree import Tree

__all__ = ["NOT_QUERIED", "Dump", "find"]

Dump = tuple["Driver | None", "tuple[Gpu, ...]", "tuple[str, ...]"]
Result = tuple["Driver | None", "tuple[Gpu, ...]", "tuple[str, ...]", "list[str]"]

NEEDED = ("/dev/nvidiactl", "/dev/nvidia-uvm")  # CUDA needs these besides each GPU's own node
SANDBOX = (
    "NVIDIA kernel module not visible, as in a sandbox (gVisor): driver and GPUs are known from NVML only"
)
NOT_QUERIED = (
    "NVML was not queried: memory and MIG mode of the GPUs are unknown, and the brand except of data-centre "
    "parts; a dump of `nvidia-smi -q -x` has them"
)


def find(
    tree: Tree, functions: tuple[Function, ...], dump: Dump | None, query: Callable[[], Nvml] | None
) -> Result:
    """Return the driver, the GPUs, the device nodes, and warnings about problems and unknown facts.

    `functions` are those on the PCI bus. At most one of `dump` and `query` is given (see
    `imagematrix.node.probe.assemble`).
    """
    warnings: list[str] = []
    kernel = nvidia.read(tree, functions)
    if dump is not None:
        driver, merged = _from_dump(dump, kernel, warnings)
        warnings += gpus.remarks(merged, kernel, complete=True)
        return driver, merged, nvidia.nodes(tree) or (), warnings
    nvml = query() if query else None
    nodes = nvidia.nodes(tree)  # after the query: NVML creates missing ones
    driver = _driver(kernel, nvml, warnings)
    merged, withheld = gpus.join(tree, kernel, nodes, nvml)
    if withheld:
        warnings.append(f"{', '.join(withheld)}: not assigned to this container or job, ignored")
    if nvml is not None and nvml.message:
        from imagematrix.node.nvml import explain

        warnings.append(explain(nvml, driver))
    elif nvml is None and kernel.loaded and merged:
        warnings.append(NOT_QUERIED)
    complete = nvml is not None and not nvml.message
    warnings += gpus.remarks(merged, kernel, complete=complete)
    if driver is not None and not kernel.loaded:
        warnings.append(SANDBOX)
    if driver is not None:
        warnings += _fabric_warnings(tree, functions, nvml)
    if driver is not None or kernel.loaded:
        warnings += _node_warnings(merged, nodes)
    return driver, merged, nodes or (), warnings


def _from_dump(dump: Dump, kernel: Kernel, warnings: list[str]) -> tuple[Driver | None, tuple[Gpu, ...]]:
    driver, dumped, remarks = dump
    warnings += remarks
    if kernel.driver is None or driver is None:
        return driver, dumped
    if kernel.driver.version == driver.version:
        return kernel.driver, dumped  # the kernel also shows the kind of module
    warnings.append(
        f"driver mismatch: {driver.version} in the nvidia-smi dump, {kernel.driver.version} in "
        f"{kernel.driver.source}; the dump's is used, and the CPU may be another host's"
    )
    return driver, dumped


def _driver(kernel: Kernel, nvml: Nvml | None, warnings: list[str]) -> Driver | None:
    version = nvml.driver if nvml and nvidia.is_version(nvml.driver or "") else None
    if kernel.driver is None:
        return Driver(version=version, kind=None, source="NVML") if version else None
    if version and version != kernel.driver.version:
        warnings.append(
            f"driver mismatch: {version} from NVML, {kernel.driver.version} in {kernel.driver.source}; "
            f"the latter is used"
        )
    return kernel.driver


def _fabric_warnings(tree: Tree, functions: tuple[Function, ...], nvml: Nvml | None) -> list[str]:
    switches = sum(function.switch for function in functions)
    managed = fabric.is_managed(tree) if switches else None
    problem = fabric.problem(switches, nvml.gpus if nvml else (), managed=managed)
    return [f"{problem}; {fabric.REMEDY}"] if problem else []


def _node_warnings(gpus: tuple[Gpu, ...], nodes: tuple[str, ...] | None) -> list[str]:
    if not gpus:
        return ["the nvidia module is loaded, but no GPU was found on the PCI bus or by the module"]
    if nodes is None:
        return ["device nodes unknown: the captured tree has no dev folder"]
    missing = [node for node in NEEDED if node not in nodes]
    if not missing:
        return []
    return [
        f"missing device nodes: {', '.join(missing)}; CUDA needs them, `nvidia-modprobe -u -c 0` creates them"
    ]
