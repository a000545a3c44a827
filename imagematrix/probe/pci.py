"""NVIDIA's GPUs on the PCI bus, which are there whether or not a driver is."""

from __future__ import annotations

import re

from imagematrix.probe.signs import PCI_LIMIT, PCI_LIST
from imagematrix.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.probe.tree import Tree

__all__ = ["PciGpu", "canonical", "order", "scan", "slots"]

VENDOR = "10de"
CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers; the HDMI audio of a GPU is 0x0403
DEVICES = "/sys/bus/pci/devices"
ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.ASCII)


class PciGpu(Record):
    """One GPU: its address, its PCI device id ("26b9"), and the kernel driver that has it, if any."""

    bus_id: str
    device_id: str
    driver: str | None = None


def canonical(address: str) -> str | None:
    """Return a PCI address as the kernel writes it: "00000000:41:00.0" is "0000:41:00.0"."""
    match = ADDRESS.fullmatch(address.strip().lower())
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{bus}:{device}.{function}"


def order(bus_id: str) -> tuple[int, ...]:
    """Return what sorts canonical addresses by domain, bus, device and function."""
    return tuple(int(part, 16) for part in re.split("[:.]", bus_id))


def slots(listing: str) -> frozenset[str]:
    """Return "bus:device.function" of each NVIDIA function in the text of /proc/bus/pci/devices.

    A line starts with bus and devfn as 4 hex digits, then vendor and device as 8 (drivers/pci/proc.c).
    """
    found = set()
    for bus, devfn in re.findall(rf"(?m)^([0-9a-f]{{2}})([0-9a-f]{{2}})\t{VENDOR}", listing):
        number = int(devfn, 16)
        found.add(f"{bus}:{number >> 3:02x}.{number & 7}")
    return frozenset(found)


def scan(tree: Tree) -> tuple[PciGpu, ...]:
    """Return the GPUs on the bus, in bus order."""
    # A large node has several hundred functions, each with files of its own in /sys.
    listing = tree.text(PCI_LIST, limit=PCI_LIMIT)
    wanted = None if listing is None else slots(listing)
    if wanted is not None and not wanted:
        return ()
    gpus = []
    for name in tree.names(DEVICES):
        bus_id = canonical(name)
        if bus_id is None or (wanted is not None and bus_id.partition(":")[2] not in wanted):
            continue
        gpu = _gpu(tree, f"{DEVICES}/{name}", bus_id)
        if gpu is not None:
            gpus.append(gpu)
    return tuple(sorted(gpus, key=lambda gpu: order(gpu.bus_id)))


def _gpu(tree: Tree, folder: str, bus_id: str) -> PciGpu | None:
    if _hex(tree.text(f"{folder}/vendor")) != VENDOR:
        return None
    kind = tree.text(f"{folder}/class")
    device_id = _hex(tree.text(f"{folder}/device"))
    if kind is None or device_id is None:
        tree.warnings.append(f"{folder} does not tell whether this NVIDIA device is a GPU")
        return None
    # A virtual function beside its physical one is for a virtual machine; inside of that it stands alone.
    if not kind.strip().lower().startswith(CLASSES) or tree.link(f"{folder}/physfn"):
        return None
    return PciGpu(bus_id=bus_id, device_id=device_id, driver=tree.link(f"{folder}/driver"))


def _hex(text: str | None) -> str | None:
    match = re.fullmatch(r"0x([0-9a-f]{4})", (text or "").strip().lower(), re.ASCII)
    return match[1] if match else None
