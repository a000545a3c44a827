"""GPUs, NVSwitches and other accelerators on the PCI bus, which shows them with or without a driver."""

from __future__ import annotations

import re
from functools import lru_cache

from imagematrix.common.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.hardware.host.tree import Tree

PCI_DEVICES = "/sys/bus/pci/devices"
NVIDIA = "10de"
# Classes (pci_ids.h of Linux); the audio function of a GPU is 0403.
DISPLAY, VGA, CONTROLLER_3D, OTHER_DISPLAY, PROCESSING = "03", "0300", "0302", "0380", "1200"
OTHER_BRIDGE = "0680"
ENCRYPTION = "1080"
NVSWITCH = "nvidia-nvswitch"  # its kernel driver; the bridges of NVIDIA's nForce chipsets have others
ADDRESS = re.compile(r"([0-9a-f]{1,8}):([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?", re.ASCII)
# A line of a function's file `resource`: start and end of a region, and its flags.
REGION = re.compile(r"0x([0-9a-f]{1,16}) 0x([0-9a-f]{1,16}) 0x([0-9a-f]{1,16})", re.ASCII)
KEPT = 4096  # addresses, of which most nodes have the same
REGIONS = 6  # those of the function (BARs); its ROM and the windows of bridges follow
MEMORY = 0x200  # IORESOURCE_MEM


class Function(Record):
    """One function that is a display adapter, a processing accelerator or an NVSwitch.

    `vendor` and `device_id` are its ids ("10de", "26b9") and `kind` its class ("0302"), each None if it could
    not be read. `driver` is the kernel driver bound to it, if any. `memory` is the largest memory region that
    it maps, in bytes, None if unknown.
    """

    bus_id: str
    vendor: str | None = None
    device_id: str | None = None
    kind: str | None = None
    driver: str | None = None
    memory: int | None = None

    @property
    def is_gpu(self) -> bool:
        """Whether it is an NVIDIA GPU."""
        return self.vendor == NVIDIA and self.kind in {VGA, CONTROLLER_3D}

    @property
    def is_switch(self) -> bool:
        """Whether it is an NVSwitch."""
        return self.kind == OTHER_BRIDGE

    @property
    def label(self) -> str:
        """The function in a message: its address, ids and class."""
        ids = f"{self.vendor or '????'}:{self.device_id or '????'}"
        return f"{self.bus_id} ({ids}, class {self.kind or 'unknown'})"


@lru_cache(maxsize=KEPT)
def normalize_address(address: str) -> str | None:
    """Return a PCI address as the kernel writes it: "00000000:41:00.0" and "0:41:0" are "0000:41:00.0"."""
    match = ADDRESS.fullmatch(address.strip().lower())
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus:0>2}:{device:0>2}.{function or 0}"


def make_sort_key(bus_id: str) -> tuple[int, ...]:
    """Return the sort key of a canonical address: domain, bus, device and function."""
    return tuple(int(part, 16) for part in re.split("[:.]", bus_id))


def list_functions(tree: Tree, wanted: Mapping[str, int] | None) -> tuple[Function, ...]:
    """Return the functions among `wanted` (see `AcceleratorHints.functions`), in bus order."""
    if wanted is not None and not wanted:
        return ()
    selected = []
    for name in tree.list_names(PCI_DEVICES):
        bus_id = normalize_address(name)
        # A large node has several hundred functions, each with its own files.
        slot = (bus_id or "").partition(":")[2]
        if bus_id is None or (wanted is not None and slot not in wanted):
            continue
        function = _read_function(tree, f"{PCI_DEVICES}/{name}", bus_id, (wanted or {}).get(slot, 0))
        if function is not None:
            selected.append(function)
    return tuple(sorted(selected, key=lambda function: make_sort_key(function.bus_id)))


def is_in_processor(tree: Tree, function: Function) -> bool:
    """Whether a display adapter of AMD is in a processor, whose security processor shares its slot."""
    slot = f"{PCI_DEVICES}/{function.bus_id.rpartition('.')[0]}"
    # The adapter itself is function 0.
    classes = (_parse_hex(tree.read_text(f"{slot}.{number}/class"), 6) or "" for number in range(1, 8))
    return any(kind.startswith(ENCRYPTION) for kind in classes)


def _read_function(tree: Tree, folder: str, bus_id: str, memory: int) -> Function | None:
    """Return the function in a folder, None if it is of another kind; `memory` is 0 if it is not known."""
    kind = (_parse_hex(tree.read_text(f"{folder}/class"), 6) or "")[:4] or None
    if kind is not None and not (kind.startswith(DISPLAY) or kind in {PROCESSING, OTHER_BRIDGE}):
        return None
    vendor = _parse_hex(tree.read_text(f"{folder}/vendor"), 4)
    if kind in {None, OTHER_BRIDGE} and vendor != NVIDIA:
        return None
    driver = tree.read_link(f"{folder}/driver")
    if kind == OTHER_BRIDGE and driver not in {None, NVSWITCH}:
        return None
    # A virtual function beside its physical one is for a virtual machine, where it appears alone.
    if tree.read_link(f"{folder}/physfn"):
        return None
    return Function(
        bus_id=bus_id,
        vendor=vendor,
        device_id=_parse_hex(tree.read_text(f"{folder}/device"), 4),
        kind=kind,
        driver=driver,
        memory=memory or _measure_memory(tree.read_text(f"{folder}/resource")),
    )


def _measure_memory(text: str | None) -> int | None:
    if text is None:
        return None
    regions = [REGION.fullmatch(line.strip()) for line in text.splitlines()[:REGIONS]]
    numbers = [[int(part, 16) for part in region.groups()] for region in regions if region]
    return max((end - start + 1 for start, end, flags in numbers if flags & MEMORY), default=0)


def _parse_hex(text: str | None, digits: int) -> str | None:
    match = re.fullmatch(rf"0x([0-9a-f]{{{digits}}})", (text or "").strip().lower(), re.ASCII)
    return match[1] if match else None
