"""NVIDIA's GPU products: by PCI device id, and by the brand that NVML reports. Sources are in gpus.json."""

from __future__ import annotations

import re
from types import MappingProxyType

from imagematrix.facts import _data
from imagematrix.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BRANDS", "DATA_CENTRE_BRANDS", "Product", "brand", "data_centre", "product"]

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
VGPU = r"-\d+[ABCQ]\b"  # the profile of a virtual GPU, as in "NVIDIA A40-8Q"


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


def brand(name: str | None) -> str | None:
    """Return a brand that NVML reports for a data-centre part of this name; None for any other name.

    `name` is that of the driver or of `product`. The table has the names that NVIDIA lists as data-centre
    products: what it does not list is not proved to be one. Where a driver calls a Tesla "nvidia", it makes
    no difference: the lists in cuda-compat have both.
    """
    words = re.split("[ /-]+", (name or "").removeprefix("NVIDIA "))
    if name is None or re.search(VGPU, name):
        return None
    if words[0] == "Tesla":
        return "tesla"
    return "nvidia" if words[0] in _data.load("gpus.json")["data_centre"].split() else None


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
