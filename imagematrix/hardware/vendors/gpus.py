"""NVIDIA's GPU products: the drivers that support them, and which are data-centre parts.

Sources are in gpus.json.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from types import MappingProxyType

from imagematrix.common.record import Record
from imagematrix.hardware.vendors import _data, cuda, device_code, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

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
# Words in the names of other parts, which may report the same brands.
OTHER_NAMES = ("geforce", "titan", "nvs", "gb10")
# The name of a virtual GPU ends in its type, as in "NVIDIA A40-8Q", "GRID T4-1B4", "NVIDIA A100-1-5CME"; the
# letter stands for workstations (Q), computing (C), desktops (B) and applications (A). Source: the Virtual
# GPU Software User Guide, "Virtual GPU Types for Supported GPUs".
VGPU = r"-\d+([AQ]|B4?|C(ME)?)\b"  # compiled on use: a selection loads this module


class Product(Record):
    """A GPU product, identified by its PCI device id.

    `compute` is its compute capability ("8.9"), None if unknown. `last_branch` is the last driver branch that
    supports it, None if the newest still does or if unknown.
    """

    pci_device_id: str
    name: str
    compute: str | None
    last_branch: int | None


def get_product(pci_device_id: str) -> Product | None:
    """Return the product with the PCI device id ("26b9" or "0x26B9"), or None if it is unknown.

    The id is a fallback for NVML's readings: a virtual function may have another one.
    """
    device_id = pci_device_id.lower().removeprefix("0x")
    table = _data.load("gpus.json")
    for row in table["chips"].values():
        if device_id in row["devices"]:
            return _make_product(device_id, row)
    return None


@cache
def list_products() -> tuple[Product, ...]:
    """Return all products whose compute capability is known, in the order of the table."""
    return tuple(
        _make_product(device_id, row)
        for row in _data.load("gpus.json")["chips"].values()
        for device_id in row["devices"]
        if row["compute"]
    )


def get_date() -> str:
    """Return the day as of which the table has the products: "2026-08-22"."""
    date: str = _data.load("gpus.json")["as_of"]
    return date


@lru_cache(maxsize=256)
def find_products(name: str) -> tuple[Product, ...]:
    """Return the products that a driver may mean by a name such as "NVIDIA H100 80GB HBM3"; empty if unknown.

    Names in the table end in other words than those of drivers. So words at the end, such as "80GB HBM3", are
    left out until some product has the others next to each other.
    """
    words = _split_words(name.removeprefix("NVIDIA "))
    for count in range(len(words), 0, -1):
        joined = "".join(words[:count])
        products = [
            product for product in list_products() if joined in _join_neighbours(_split_words(product.name))
        ]
        if products:
            return tuple(products)
    return ()


def _make_product(device_id: str, row: Mapping[str, Any]) -> Product:
    return Product(
        pci_device_id=device_id,
        name=row["devices"][device_id],
        compute=row["compute"],
        last_branch=_data.load("gpus.json")["last_branches"].get(device_id, row["last_branch"]),
    )


def find_capabilities(name: str) -> tuple[str, ...]:
    """Return the compute capabilities of the products with a name, such as H100 or "rtx 4090", sorted.

    The name may be words from the middle of a product's, in any case and with any separators.
    """
    joined = "".join(_split_words(name))
    capabilities = {
        product.compute
        for product in list_products()
        if product.compute and joined and joined in _join_neighbours(_split_words(product.name))
    }
    return tuple(sorted(capabilities, key=versions.make_sort_key))


def find_products_with_less_memory(mib: int) -> Mapping[str, int]:
    """Return products that have a little less memory, at most a tenth of it, each with what NVML reports.

    A product that is sold with 16 GiB reports less, so that a need of 16 GiB leaves it out.
    """
    table: Mapping[str, int] = _data.load("gpus.json")["memory_mib"]
    return {name: size for name, size in table.items() if size < mib <= size + size // 10}


def _split_words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9.]+", name.lower())


def _join_neighbours(words: list[str]) -> set[str]:
    """Return the words that follow each other, joined: of "a b c" also "ab", "bc" and "abc"."""
    return {
        "".join(words[first:last]) for first in range(len(words)) for last in range(first + 1, len(words) + 1)
    }


@lru_cache(maxsize=1024)
def get_last_branch(pci_device_id: str | None, compute: str | None) -> int | None:
    """Return the last driver branch that supports a GPU; None if the newest does or if unknown.

    For an unknown device, the chips with its compute capability decide.
    """
    product = get_product(pci_device_id) if pci_device_id else None
    return product.last_branch if product else _list_last_branches_of_chips().get(compute)


@lru_cache(maxsize=256)
def get_first_branch(compute: str | None) -> int:
    """Return the first driver branch that supports any GPU of a capability or a newer one; 0 if unknown."""
    key = versions.make_sort_key(compute) if compute else ()
    return max(
        (branch for first, branch in list_first_branches().items() if versions.make_sort_key(first) <= key),
        default=0,
    )


@cache
def list_first_branches() -> Mapping[str, int]:
    """Return the branches that `get_first_branch` returns, each by the first capability for which it does.

    The first branch for a GPU is that of the first CUDA release that compiles for it. The capabilities of the
    oldest release in the table are left out: earlier ones may compile for them.
    """
    oldest, *later = cuda.load_releases().values()
    firsts: dict[str, int] = {}
    for release in later:
        for compute in {device_code.get_capability(target) for target in release.targets - oldest.targets}:
            firsts.setdefault(compute, release.branch or 0)
    steps: dict[str, int] = {}
    least = max(firsts.values())
    for compute in sorted(
        firsts.keys() - device_code.list_tegra_capabilities(), key=versions.make_sort_key, reverse=True
    ):
        least = min(least, firsts[compute])
        steps = {newer: branch for newer, branch in steps.items() if branch > least} | {compute: least}
    return MappingProxyType(steps)


@lru_cache(maxsize=1024)
def is_supported(kind: str | None, compute: str | None) -> bool:
    """Whether kernel modules of a kind ("open", "proprietary") support GPUs of a compute capability.

    True if either is unknown.
    """
    limit = get_module_bounds().get(kind or "")
    if compute is None or limit is None:
        return True
    bound, capability = versions.make_sort_key(limit), versions.make_sort_key(compute)
    return capability >= bound if kind == "open" else capability <= bound


def get_module_bounds() -> Mapping[str, str]:
    """Return, for each kind of kernel modules, the first or the last capability that it supports."""
    bounds: dict[str, str] = _data.load("gpus.json")["kernel_modules"]
    return bounds


def get_brand(name: str | None) -> str | None:
    """Return a brand that NVML reports for a data-centre part of this name; None for any other name.

    `name` comes from the driver or from `get_product`. The table has the names that NVIDIA lists as
    data-centre products; other parts are not proved to be data-centre parts. Some drivers report "nvidia" for
    a Tesla, which makes no difference: the lists in cuda-compat have both.
    """
    if name is None or is_vgpu(name):
        return None
    words = re.split("[ /-]+", name.removeprefix("NVIDIA "))
    if words[0] == "Tesla":
        return "tesla"
    listed = (entry.split() for entry in _data.load("gpus.json")["data_centre"])
    return "nvidia" if any(words[: len(entry)] == entry for entry in listed) else None


def is_vgpu(name: str | None) -> bool:
    """Whether this is the name of a virtual GPU."""
    return name is not None and re.search(VGPU, name, re.ASCII) is not None


def is_data_centre(brand: str | None, name: str | None) -> bool:
    """Whether a GPU is a data-centre part; cuda-compat supports only these.

    `brand` is one of `BRANDS`. Without it, only the name "Tesla" proves a data-centre part.
    """
    words = (name or "").lower().split()
    if any(word in words for word in OTHER_NAMES):
        return False
    if brand is None or brand.lower() == "unknown":
        return "tesla" in words
    return brand.lower() in DATA_CENTRE_BRANDS


@cache
def list_last_branches() -> frozenset[int]:
    """Return the driver branches that are the last to support some GPU."""
    table = _data.load("gpus.json")
    listed = {row["last_branch"] for row in table["chips"].values()} | {*table["last_branches"].values()}
    return frozenset(filter(None, listed))


@cache
def list_first_ends() -> Mapping[str, int]:
    """Return, by compute capability, the earliest driver branch that is the last for some product."""
    table = _data.load("gpus.json")
    ends: dict[str, int] = {}
    for row in table["chips"].values():
        lasts = {row["last_branch"], *(table["last_branches"].get(device) for device in row["devices"])}
        first = min(filter(None, lasts), default=None)
        if row["compute"] and first:
            ends[row["compute"]] = min(first, ends.get(row["compute"], first))
    return MappingProxyType(ends)


@cache
def _list_last_branches_of_chips() -> dict[str | None, int | None]:
    """Return the last branch by compute capability, taken from the chip with the longest driver support."""
    branches: dict[str | None, int | None] = {}
    for row in _data.load("gpus.json")["chips"].values():
        compute, last = row["compute"], row["last_branch"]
        known = branches.get(compute, last)
        branches[compute] = last and known and max(last, known)
    return branches
