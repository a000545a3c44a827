"""Signs of accelerators on a host that are cheap to read; without any, nothing more is loaded or read."""

from __future__ import annotations

import re

from imagematrix.common.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.hardware.host.tree import Tree

PCI_LIST = "/proc/bus/pci/devices"  # one file with vendor and memory of every function on the bus
PCI_LIMIT = 8 * 1024 * 1024  # bytes; about 50,000 functions
MODULES = ("nvidia", "nvgpu")  # nvgpu is Tegra's
# NVIDIA, AMD and Habana: all their functions count, because the list lacks memory that could not be mapped.
VENDORS = frozenset({"10de", "1002", "1da3"})
MAPPED = 5  # hex digits: more mean at least 1 MiB, which accelerators map and most other functions do not
FIRST_SIZE, SIZES = 9, 6  # fields after the address: they follow the ids, the interrupt and 7 addresses
NODES = re.compile(r"nvidia[\w-]*|dxg|kfd|nvhost-[\w-]*|nvmap|nvgpu|neuron\d+|accel\d+|hl\d+", re.ASCII)
GPU_NODE = re.compile(r"nvidia\d+", re.ASCII)


class AcceleratorHints(Record):
    """The signs of accelerators on a host.

    `modules` are NVIDIA's loaded modules, `nodes` the names in /dev that may be accelerators, and `tegra`
    states that the device tree is a Tegra's. `functions` maps the functions on the PCI bus that may be
    accelerators, as bus:device.function, to the largest memory in bytes that each maps; None if every
    function must be checked.
    """

    modules: tuple[str, ...]
    nodes: tuple[str, ...]
    tegra: bool
    functions: Mapping[str, int] | None

    @property
    def has_nvidia(self) -> bool:
        """Whether there is any trace of NVIDIA's driver, including device nodes alone."""
        return "nvidia" in self.modules or any(name.startswith("nvidia") for name in self.nodes)

    @property
    def has_driver(self) -> bool:
        """Whether NVML may have readings: the module is loaded, or a GPU has a device node.

        The kernel of a sandbox does not show the module. The control node alone proves nothing: NVML creates
        /dev/nvidiactl even without a driver.
        """
        return "nvidia" in self.modules or any(map(GPU_NODE.fullmatch, self.nodes))


def find_hints(tree: Tree) -> AcceleratorHints:
    """Return the signs in `tree`."""
    listing = tree.read_text(PCI_LIST, limit=PCI_LIMIT)
    return AcceleratorHints(
        modules=_find_modules(tree),
        nodes=tuple(name for name in tree.list_names("/dev") if NODES.fullmatch(name)),
        tegra="nvidia,tegra" in (tree.read_text("/proc/device-tree/compatible") or ""),
        functions=None if listing is None else parse_slots(listing),
    )


def parse_slots(listing: str) -> dict[str, int]:
    """Return the functions in the text of /proc/bus/pci/devices that may be accelerators.

    A line has bus and devfn as 4 hex digits, vendor and device as 8, the interrupt, the addresses of six
    regions and a ROM, their sizes, and a driver (drivers/pci/proc.c). It has no domain: of functions that
    differ only in the domain, the one with more memory counts.
    """
    memory: dict[str, int] = {}
    for line in listing.splitlines():
        address, *fields = line.split("\t")
        vendor = fields[0][:4] if fields else ""
        sizes = [size for size in fields[FIRST_SIZE : FIRST_SIZE + SIZES] if len(size.strip()) > MAPPED]
        if (sizes or vendor in VENDORS) and re.fullmatch("[0-9a-f]{4}", address, re.ASCII):
            name = format_slot(int(address, 16))
            memory[name] = max([memory.get(name, 0), *map(_parse_hex, sizes)])
    return memory


def format_slot(number: int) -> str:
    """Return bus:device.function of a function's number, which has 8, 5 and 3 bits for them."""
    return f"{number >> 8 & 0xFF:02x}:{number >> 3 & 31:02x}.{number & 7}"


def _parse_hex(text: str) -> int:
    return int(text, 16) if re.fullmatch(" *[0-9a-f]{1,16}", text, re.ASCII) else 0


def _find_modules(tree: Tree) -> tuple[str, ...]:
    # Any of these shows a module; a captured tree may have only one of them.
    if tree.has_folder("/proc/driver/nvidia"):
        return ("nvidia",)
    if tree.has_folder("/sys/module"):
        return tuple(name for name in MODULES if tree.has_folder(f"/sys/module/{name}"))
    loaded = {line.partition(" ")[0] for line in (tree.read_text("/proc/modules") or "").splitlines()}
    return tuple(name for name in MODULES if name in loaded)
