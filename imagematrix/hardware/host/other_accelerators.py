"""Signs of accelerators that images do not support: with any, a host does not count as one without GPUs."""

from __future__ import annotations

from imagematrix.common.record import Record
from imagematrix.hardware.host import pci
from imagematrix.hardware.host.accelerator_hints import format_slot
from imagematrix.hardware.host.host import Accelerator
from imagematrix.hardware.host.pci import CONTROLLER_3D, NVIDIA, OTHER_DISPLAY, PROCESSING, VGA

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from imagematrix.hardware.host.accelerator_hints import AcceleratorHints
    from imagematrix.hardware.host.host import Gpu
    from imagematrix.hardware.host.pci import Function
    from imagematrix.hardware.host.tree import Tree

AMD, INTEL = "1002", "8086"
# Bytes: a display adapter that is a compute card maps at least this, unless the firmware lets it map only a
# part of its memory; an adapter in a processor maps less.
LARGE = 8 * 1024**3
LOCAL = 4 * 1024**3  # bytes of local memory of a card that may map only a part of it
ROOT_BUS = "00"  # the bus of devices in the processor
# AMD's GPUs in the topology of its compute driver KFD (kfd_topology.c of Linux).
TOPOLOGY = "/sys/class/kfd/kfd/topology/nodes"
OWN_HEAPS = frozenset({1, 2})  # of a GPU's own memory: HSA_MEM_HEAP_TYPE_FB_PUBLIC, _PRIVATE
DIGITS = 20  # of a number with 64 bits

FOREIGN = "images support only NVIDIA GPUs and CPUs"
IGNORED = "ignored, integrated or for display only"
UNREAD = "could not read its class"
NO_GPU = "the module is loaded, but neither the PCI bus nor the module shows a GPU"
NO_DRIVER = "neither the kernel nor NVML (libnvidia-ml.so.1) reports a GPU for it"
WSL = "GPUs of WSL 2 have no device nodes that a container could get"
TEGRA = "a Tegra GPU needs the libraries of its JetPack, which images do not have"


class KfdNode(Record):
    """A GPU: the largest bank of its local memory in bytes, and whether it shares a node with processors."""

    memory: int
    integrated: bool


def find_accelerators(
    tree: Tree, hints: AcceleratorHints, functions: tuple[Function, ...], gpus: tuple[Gpu, ...]
) -> tuple[tuple[Accelerator, ...], list[str]]:
    """Return the accelerators that are not among `gpus`, and warnings about ignored devices.

    `functions` are those on the PCI bus. If there are GPUs, ignored devices need no warning.
    """
    functions = tuple(function for function in functions if not function.is_switch)
    accelerators = (
        *_find_functions(tree, functions),
        *_find_nodes(hints, functions),
        *(() if gpus else _find_traces_of_driver(hints)),
    )
    counted = {accelerator.where for accelerator in accelerators}
    labels = [function.label for function in functions if not function.is_gpu]
    ignored = [label for label in labels if label not in counted]
    if gpus or not ignored:
        return accelerators, []
    kfd = ", with /dev/kfd" if "kfd" in hints.nodes else ""
    return accelerators, [f"{', '.join(ignored)}{kfd}: {IGNORED}"]


def _find_functions(tree: Tree, functions: tuple[Function, ...]) -> Iterator[Accelerator]:
    kfd_nodes = _read_topology(tree) if any(function.vendor == AMD for function in functions) else {}
    for function in functions:
        if function.kind is None:
            yield Accelerator(kind="pci", where=function.label, why=UNREAD)
        elif not function.is_gpu and _is_compute_card(tree, function, kfd_nodes):
            yield Accelerator(kind="pci", where=function.label, why=FOREIGN)


def _is_compute_card(tree: Tree, function: Function, kfd_nodes: Mapping[str, KfdNode]) -> bool:
    if function.kind == CONTROLLER_3D or function.vendor == NVIDIA:
        return True
    small = function.memory is not None and function.memory < LARGE
    if function.kind == PROCESSING:  # the NPU in an Intel processor has this class too
        return not (small and function.vendor == INTEL and function.bus_id.split(":")[1] == ROOT_BUS)
    if function.kind not in {VGA, OTHER_DISPLAY} or function.vendor not in {AMD, INTEL}:
        return False
    node = kfd_nodes.get(function.bus_id)
    if small and (node is None or node.memory < LOCAL):
        return False
    # A processor's memory can be that of its display adapter too.
    return not (node is not None and node.integrated) and not pci.is_in_processor(tree, function)


def _find_nodes(hints: AcceleratorHints, functions: tuple[Function, ...]) -> Iterator[Accelerator]:
    for name in hints.nodes:
        if name == "dxg":
            yield Accelerator(kind="wsl", where="/dev/dxg", why=WSL)
        elif name == "kfd":
            if not any(function.vendor == AMD for function in functions):  # else `_find_functions` has judged
                yield Accelerator(kind="device", where="/dev/kfd", why=FOREIGN)
        elif name in {"nvmap", "nvgpu"} or name.startswith("nvhost-"):
            yield Accelerator(kind="tegra", where=f"/dev/{name}", why=TEGRA)
        elif not name.startswith("nvidia"):
            yield Accelerator(kind="device", where=f"/dev/{name}", why=FOREIGN)
    if hints.tegra:
        yield Accelerator(kind="tegra", where="/proc/device-tree/compatible", why=TEGRA)


def _find_traces_of_driver(hints: AcceleratorHints) -> Iterator[Accelerator]:
    for name in hints.modules:
        yield Accelerator(kind="module", where=name, why=TEGRA if name == "nvgpu" else NO_GPU)
    # NVML creates /dev/nvidiactl even without a driver: alone it proves nothing.
    for name in hints.nodes:
        if name.startswith("nvidia") and name != "nvidiactl":
            yield Accelerator(kind="device", where=f"/dev/{name}", why=NO_DRIVER)


def _read_topology(tree: Tree) -> dict[str, KfdNode]:
    """Return AMD's GPUs in the topology of KFD, by their addresses on the PCI bus."""
    kfd_nodes = {}
    for name in tree.list_names(TOPOLOGY):
        facts = _read_numbers(tree, f"{TOPOLOGY}/{name}/properties")
        if not facts.get("simd_count"):  # a node of processors only, or one that this process may not see
            continue
        bus_id = f"{facts.get('domain', 0):04x}:{format_slot(facts.get('location_id', 0))}"
        banks = f"{TOPOLOGY}/{name}/mem_banks"
        properties = [_read_numbers(tree, f"{banks}/{bank}/properties") for bank in tree.list_names(banks)]
        sizes = [bank.get("size_in_bytes", 0) for bank in properties if bank.get("heap_type") in OWN_HEAPS]
        kfd_nodes[bus_id] = KfdNode(
            memory=max(sizes, default=0),
            integrated=facts.get("cpu_cores_count", 0) > 0,
        )
    return kfd_nodes


def _read_numbers(tree: Tree, path: str) -> dict[str, int]:
    """Return the lines `NAME NUMBER` of a file."""
    pairs = (line.split() for line in (tree.read_text(path) or "").splitlines())
    return {
        pair[0]: int(pair[1])
        for pair in pairs
        if len(pair) == 2 and pair[1].isascii() and pair[1].isdecimal() and len(pair[1]) <= DIGITS  # noqa: PLR2004
    }
