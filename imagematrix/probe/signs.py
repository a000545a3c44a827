"""The cheap signs of NVIDIA on a host, without which nothing more is loaded or read."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.probe.tree import Tree

__all__ = ["PCI_LIMIT", "PCI_LIST", "shows_nvidia"]

PCI_LIST = "/proc/bus/pci/devices"  # one file that names the vendor of every function on the bus
PCI_LIMIT = 8 * 1024 * 1024  # bytes; about 50,000 functions


def shows_nvidia(tree: Tree) -> bool:
    """Whether there may be a driver, a device node or a GPU of NVIDIA's."""
    if tree.has_folder("/proc/driver/nvidia") or tree.has_folder("/sys/module/nvidia"):
        return True
    if any(name.startswith("nvidia") for name in tree.names("/dev")):
        return True
    listing = tree.text(PCI_LIST, limit=PCI_LIMIT)
    # The vendor begins the second field. Without that list, each device has to be asked.
    return "\t10de" in listing if listing is not None else bool(tree.names("/sys/bus/pci/devices"))
