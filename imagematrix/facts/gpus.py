"""NVIDIA's GPU products: which drivers support one, and which are data-centre parts.

Sources are in gpus.json.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from types import MappingProxyType

from imagematrix.facts import _data, versions
from imagematrix.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "BRANDS",
    "DATA_CENTRE_BRANDS",
    "Product",
    "brand",
    "data_centre",
    "drives",
    "is_vgpu",
    "last_branch",
    "product",
]

# nvmlBrandType_t of nvml.h
BRANDS: Mapping[int, str] = MappingProxyType(
    {
        0: "unknown",
        1: "quadro",
        2: "tesla",
        3: "nvs",
        4: "grid",
        5: "geforce",
        6: "titan",
        7: "vapps",
        8: "vpc",
        9: "vcs",
        10: "vws",
        11: "cloudgaming",
        12: "quadrortx",
        13: "nvidiartx",
        14: "nvidia",
        15: "geforcertx",
        16: "titanrtx",
    }
)

# Data-centre parts from Ampere on report "nvidia" where older ones report "tesla".
DATA_CENTRE_BRANDS = frozenset({"tesla", "nvidia"})
# Words in the names of others, which may report the same.
OTHER_NAMES = ("geforce", "titan", "nvs", "gb10")
# The type of a virtual GPU ends its name, as in "NVIDIA A40-8Q", "GRID T4-1B4", "NVIDIA A100-1-5CME"; the
# letter is for workstations (Q), computing (C), desktops (B) and applications (A). Source: the Virtual GPU
# Software User Guide, "Virtual GPU Types for Supported GPUs".
VGPU = r"-\d+([AQ]|B4?|C(ME)?)\b"  # compiled when it is needed: a selection loads this module


class Product(Record):
    """A GPU product, as far as its PCI device id tells.

    `compute` is its compute capability ("8.9"), None where no table has it. `last_branch` is the last driver
    branch that supports it, None where the newest still does or where no table tells.
    """

    pci_device_id: str
    chip: str
    name: str
    compute: str | None
    last_branch: int | None


def product(pci_device_id: str) -> Product | None:
    """Return the product with the PCI device id ("26b9" or "0x26B9"), or None where it is not known.

    The id is a fallback for what NVML would tell: a virtual function may show another.
    """
    number = pci_device_id.lower().removeprefix("0x")
    table = _data.load("gpus.json")
    for chip, row in table["chips"].items():
        name = row["devices"].get(number)
        if name is not None:
            return Product(
                pci_device_id=number,
                chip=chip,
                name=name,
                compute=row["compute"],
                last_branch=table["last_branches"].get(number, row["last_branch"]),
            )
    return None


@lru_cache(maxsize=1024)
def last_branch(pci_device_id: str | None, compute: str | None) -> int | None:
    """Return the last driver branch that supports a GPU; None where the newest does or nothing is known.

    Of a device that no table has, it is that of all chips of its compute capability.
    """
    known = product(pci_device_id) if pci_device_id else None
    return known.last_branch if known else _last_branches().get(compute)


def drives(kind: str | None, compute: str | None) -> bool:
    """Whether kernel modules of a kind ("open", "proprietary") drive GPUs of a compute capability.

    What is not known of either does not speak against it.
    """
    bounds: dict[str, str] = _data.load("gpus.json")["kernel_modules"]
    if compute is None or kind not in bounds:
        return True
    bound, own = versions.order(bounds[kind]), versions.order(compute)
    return own >= bound if kind == "open" else own <= bound


def brand(name: str | None) -> str | None:
    """Return a brand that NVML reports for a data-centre part of this name; None for any other name.

    `name` is that of the driver or of `product`. The table has the names that NVIDIA lists as data-centre
    products: what it does not list is not proved to be one. Where a driver calls a Tesla "nvidia", it makes
    no difference: the lists in cuda-compat have both.
    """
    if name is None or is_vgpu(name):
        return None
    words = re.split("[ /-]+", name.removeprefix("NVIDIA "))
    if words[0] == "Tesla":
        return "tesla"
    listed = (known.split() for known in _data.load("gpus.json")["data_centre"])
    return "nvidia" if any(words[: len(known)] == known for known in listed) else None


def is_vgpu(name: str | None) -> bool:
    """Whether this is the name of a virtual GPU."""
    return name is not None and re.search(VGPU, name, re.ASCII) is not None


def data_centre(brand: str | None, name: str | None) -> bool:
    """Whether a GPU is a data-centre part, which is what cuda-compat supports.

    `brand` is one of `BRANDS`. Without one, only the name "Tesla" proves it.
    """
    words = (name or "").lower().split()
    if any(word in words for word in OTHER_NAMES):
        return False
    if brand is None or brand.lower() == "unknown":
        return "tesla" in words
    return brand.lower() in DATA_CENTRE_BRANDS


@cache
def _last_branches() -> dict[str | None, int | None]:
    """Return the last branch for each compute capability: that of the chip which drivers support longest."""
    found: dict[str | None, int | None] = {}
    for row in _data.load("gpus.json")["chips"].values():
        compute, last = row["compute"], row["last_branch"]
        other = found.get(compute, last)
        found[compute] = last and other and max(last, other)
    return found
