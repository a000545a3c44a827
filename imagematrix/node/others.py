"""The signs of accelerators that are none of a host's GPUs: with any, it does not pass for one without."""

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
# Memory that a display adapter maps as a whole if it is a card for computing; one in a processor maps less.
LARGE = 8 * 1024**3
ROOT_BUS = "00"  # what is built into a processor is there

FOREIGN = "images are for NVIDIA's GPUs and for CPUs"
UNREAD = "what it is could not be read"
NO_GPU = "the module is loaded, and neither the PCI bus nor the module itself shows a GPU"
NO_DRIVER = "neither the kernel nor NVML (libnvidia-ml.so.1) tells of a GPU behind it"
WSL = "the GPUs of WSL 2 are behind it, and have no device nodes that a container could be given"
TEGRA = "a Tegra's GPU needs the libraries of its JetPack, which images do not carry"


def find(
    signs: Signs, functions: tuple[Function, ...], gpus: tuple[Gpu, ...]
) -> tuple[tuple[Accelerator, ...], list[str]]:
    """Return the accelerators that are none of `gpus`, and a sentence about what is none that matters.

    `functions` are those on the PCI bus. Beside GPUs nobody wonders about the others.
    """
    found = [*_functions(functions), *_nodes(signs, functions), *([] if gpus else _driver(signs))]
    counted = {one.where for one in found}
    displays = [one.label for one in functions if not one.gpu and one.label not in counted]
    if gpus or not displays:
        return tuple(found), []
    kfd = ", with /dev/kfd" if "kfd" in signs.nodes else ""
    return tuple(found), [f"{', '.join(displays)}{kfd}: built in or for display only; images leave it alone"]


def _functions(functions: tuple[Function, ...]) -> Iterator[Accelerator]:
    for one in functions:
        if one.kind is None:
            yield Accelerator(kind="pci", where=one.label, why=UNREAD)
        elif not one.gpu and _computes(one):
            yield Accelerator(kind="pci", where=one.label, why=FOREIGN)


def _computes(one: Function) -> bool:
    if one.kind == CONTROLLER_3D or one.vendor == NVIDIA:
        return True
    small = one.memory is not None and one.memory < LARGE
    if one.kind == PROCESSING:  # the NPU in a processor of Intel's is one, too
        return not (small and one.vendor == INTEL and one.bus_id.split(":")[1] == ROOT_BUS)
    return one.kind == OTHER_DISPLAY and one.vendor in {AMD, INTEL} and not small


def _nodes(signs: Signs, functions: tuple[Function, ...]) -> Iterator[Accelerator]:
    for name in signs.nodes:
        if name == "dxg":
            yield Accelerator(kind="wsl", where="/dev/dxg", why=WSL)
        elif name == "kfd":
            if not any(one.vendor == AMD for one in functions):
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
    # NVML makes /dev/nvidiactl by itself where there is no driver: alone it shows nothing.
    for name in signs.nodes:
        if name.startswith("nvidia") and name != "nvidiactl":
            yield Accelerator(kind="device", where=f"/dev/{name}", why=NO_DRIVER)
