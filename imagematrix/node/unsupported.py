"""Signs of accelerators that images do not support: with any, a host does not count as one without GPUs."""

from __future__ import annotations

from imagematrix.node.host import Accelerator
from imagematrix.node.pci import CONTROLLER_3D, NVIDIA, OTHER_DISPLAY, PROCESSING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.node.host import Gpu
    from imagematrix.node.pci import Function
    from imagematrix.node.signs import Signs

__all__ = ["find"]

AMD, INTEL = "1002", "8086"
# Bytes: a display adapter that is a compute card maps at least this; an adapter in a processor maps less.
LARGE = 8 * 1024**3
ROOT_BUS = "00"  # the bus of devices in the processor

FOREIGN = "images support only NVIDIA GPUs and CPUs"
UNREAD = "could not read its class"
NO_GPU = "the module is loaded, but neither the PCI bus nor the module shows a GPU"
NO_DRIVER = "neither the kernel nor NVML (libnvidia-ml.so.1) reports a GPU for it"
WSL = "GPUs of WSL 2 have no device nodes that a container could get"
TEGRA = "a Tegra GPU needs the libraries of its JetPack, which images do not have"


def find(
    signs: Signs, functions: tuple[Function, ...], gpus: tuple[Gpu, ...]
) -> tuple[tuple[Accelerator, ...], list[str]]:
    """Return the accelerators that are not among `gpus`, and warnings about ignored devices.

    `functions` are those on the PCI bus. If there are GPUs, ignored devices need no warning.
    """
    functions = tuple(function for function in functions if not function.switch)
    accelerators = (*_functions(functions), *_nodes(signs, functions), *(() if gpus else _driver(signs)))
    counted = {accelerator.where for accelerator in accelerators}
    ignored = [function.label for function in functions if not function.gpu and function.label not in counted]
    if gpus or not ignored:
        return accelerators, []
    kfd = ", with /dev/kfd" if "kfd" in signs.nodes else ""
    return accelerators, [f"{', '.join(ignored)}{kfd}: ignored, integrated or for display only"]


def _functions(functions: tuple[Function, ...]) -> Iterator[Accelerator]:
    for function in functions:
        if function.kind is None:
            yield Accelerator(kind="pci", where=function.label, why=UNREAD)
        elif not function.gpu and _computes(function):
            yield Accelerator(kind="pci", where=function.label, why=FOREIGN)


def _computes(function: Function) -> bool:
    if function.kind == CONTROLLER_3D or function.vendor == NVIDIA:
        return True
    small = function.memory is not None and function.memory < LARGE
    if function.kind == PROCESSING:  # the NPU in an Intel processor has this class too
        return not (small and function.vendor == INTEL and function.bus_id.split(":")[1] == ROOT_BUS)
    return function.kind == OTHER_DISPLAY and function.vendor in {AMD, INTEL} and not small


def _nodes(signs: Signs, functions: tuple[Function, ...]) -> Iterator[Accelerator]:
    for name in signs.nodes:
        if name == "dxg":
            yield Accelerator(kind="wsl", where="/dev/dxg", why=WSL)
        elif name == "kfd":
            if not any(function.vendor == AMD for function in functions):
                yield Accelerator(kind="device", where="/dev/kfd", why=FOREIGN)
        elif name in {"nvmap", "nvgpu"} or name.startswith("nvhost-"):
            yield Accelerator(kind="tegra", where=f"/dev/{name}", why=TEGRA)
        elif not name.startswith("nvidia"):
            yield Accelerator(kind="device", where=f"/dev/{name}", why=FOREIGN)
    if signs.tegra:
        yield Accelerator(kind="tegra", where="/proc/device-tree/compatible", why=TEGRA)


def _driver(signs: Signs) -> Iterator[Accelerator]:
    for name in signs.modules:
        yield Accelerator(kind="module", where=name, why=TEGRA if name == "nvgpu" else NO_GPU)
    # NVML creates /dev/nvidiactl even without a driver: alone it proves nothing.
    for name in signs.nodes:
        if name.startswith("nvidia") and name != "nvidiactl":
            yield Accelerator(kind="device", where=f"/dev/{name}", why=NO_DRIVER)
