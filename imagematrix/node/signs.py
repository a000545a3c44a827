"""The cheap signs of accelerators on a host, without which nothing more is loaded or read."""

from __future__ import annotations

import re

from imagematrix.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.node.tree import Tree

__all__ = ["PCI_DEVICES", "Signs", "look", "slots"]

PCI_LIST = "/proc/bus/pci/devices"  # one file that names vendor and memory of every function on the bus
PCI_LIMIT = 8 * 1024 * 1024  # bytes; about 50,000 functions
PCI_DEVICES = "/sys/bus/pci/devices"
MODULES = ("nvidia", "nvgpu")  # nvgpu is that of Tegra parts
# NVIDIA, AMD and Habana: a look at all of theirs, because memory that could not be mapped is not listed.
VENDORS = frozenset({"10de", "1002", "1da3"})
MAPPED = 5  # hex digits: with more there is a MiB or more, which accelerators have and most others do not
FIRST_SIZE, SIZES = 9, 6  # among the fields after the place: behind the ids, the interrupt and 7 addresses
NODES = re.compile(r"nvidia.*|dxg|kfd|nvhost-.*|nvmap|nvgpu|neuron\d+|accel\d+|hl\d+", re.ASCII)
GPU_NODE = re.compile(r"nvidia\d+", re.ASCII)


class Signs(Record):
    """What there is to look into.

    `modules` are NVIDIA's that are loaded, `nodes` the names in /dev that may be those of accelerators, and
    `tegra` says that the device tree is a Tegra's. `functions` has the most memory, in bytes, that each
    function on the PCI bus maps which may be an accelerator, by bus:device.function; None where all there are
    have to be asked.
    """

    modules: tuple[str, ...]
    nodes: tuple[str, ...]
    tegra: bool
    functions: Mapping[str, int] | None

    @property
    def nvidia(self) -> bool:
        """Whether there is anything of a driver of NVIDIA's, if only device nodes."""
        return "nvidia" in self.modules or any(name.startswith("nvidia") for name in self.nodes)

    @property
    def driver(self) -> bool:
        """Whether NVML may have something to tell: the module is loaded, or a GPU has a device node.

        The kernel of a sandbox shows nothing of the module. A node for control alone proves nothing: NVML
        makes /dev/nvidiactl by itself where there is no driver.
        """
        return "nvidia" in self.modules or any(map(GPU_NODE.fullmatch, self.nodes))


def look(tree: Tree) -> Signs:
    """Return the signs in `tree`."""
    listing = tree.text(PCI_LIST, limit=PCI_LIMIT)
    return Signs(
        modules=_modules(tree),
        nodes=tuple(name for name in tree.names("/dev") if NODES.fullmatch(name)),
        tegra="nvidia,tegra" in (tree.text("/proc/device-tree/compatible") or ""),
        functions=None if listing is None else slots(listing),
    )


def slots(listing: str) -> dict[str, int]:
    """Return the functions in the text of /proc/bus/pci/devices that may be accelerators.

    A line starts with bus and devfn as 4 hex digits, then vendor and device as 8, the interrupt, and the
    addresses of six regions and a ROM; then come the sizes of these, and a driver (drivers/pci/proc.c). It
    does not tell the domain: of functions that differ in that alone the one with more memory counts.
    """
    found: dict[str, int] = {}
    for line in listing.splitlines():
        place, *fields = line.split("\t")
        vendor = fields[0][:4] if fields else ""
        sizes = [size for size in fields[FIRST_SIZE : FIRST_SIZE + SIZES] if len(size.strip()) > MAPPED]
        if (sizes or vendor in VENDORS) and re.fullmatch("[0-9a-f]{4}", place, re.ASCII):
            number = int(place, 16)
            slot = f"{number >> 8:02x}:{number >> 3 & 31:02x}.{number & 7}"
            found[slot] = max([found.get(slot, 0), *map(_hex, sizes)])
    return found


def _hex(text: str) -> int:
    return int(text, 16) if re.fullmatch(" *[0-9a-f]{1,16}", text, re.ASCII) else 0


def _modules(tree: Tree) -> tuple[str, ...]:
    if tree.has_folder("/proc/driver/nvidia"):
        return ("nvidia",)
    if tree.has_folder("/sys/module"):
        return tuple(name for name in MODULES if tree.has_folder(f"/sys/module/{name}"))
    loaded = {line.partition(" ")[0] for line in (tree.text("/proc/modules") or "").splitlines()}
    return tuple(name for name in MODULES if name in loaded)
