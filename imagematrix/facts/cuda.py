"""CUDA releases and the drivers that run them.

NVIDIA guarantees that a driver runs every program of its own CUDA release and of older ones, and, from
CUDA 11 on, that it runs programs of any later release with the same major once it is not older than that
major's floor (minor-version compatibility). The second does not cover PTX: what a driver compiles is bound
by its own CUDA release. Sources are in cuda.json.
"""

from __future__ import annotations

from functools import cache, lru_cache
from types import MappingProxyType

from imagematrix.facts import _data, versions
from imagematrix.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

__all__ = [
    "COMPRESSED_FATBIN_DRIVER",
    "Release",
    "driver_cuda",
    "driver_runs",
    "lowest_driver",
    "ptx_isa",
    "release",
    "releases",
]

COMPRESSED_FATBIN_DRIVER = "550.54.14"  # the oldest that reads what nvcc --compress-mode writes


class Release(Record):
    """A CUDA toolkit release such as "12.4", with its updates. What is not known is None.

    `toolkit_driver` is the oldest Linux driver that NVIDIA lists for one of its updates, and `floor` the
    oldest for the whole family of its major. `branch` is the driver branch that brought the release.
    `targets` are the cubins that its ptxas makes ("86", "90a"), none of a release that only drivers have.
    `ptx_isa` is the newest PTX ISA version it writes and reads, `max_gcc` and `max_clang` are the newest
    major versions that nvcc takes as its host compiler.
    """

    name: str
    toolkit_driver: str | None
    floor: str | None
    branch: int | None
    targets: frozenset[str]
    ptx_isa: str | None
    max_gcc: int | None
    max_clang: int | None


@cache
def releases() -> Mapping[str, Release]:
    """Return the known CUDA releases by name, oldest first."""
    table = _data.load("cuda.json")["releases"]
    return MappingProxyType({name: _release(name, row) for name, row in table.items()})


def release(name: str) -> Release | None:
    """Return the CUDA release `name` ("12.4"), or None where it is not known."""
    return releases().get(name)


@lru_cache(maxsize=1024)
def driver_cuda(driver: str) -> str | None:
    """Return the newest CUDA release that `driver` brought.

    It is that of the driver's branch, or of the newest known branch below it; None below them all. Early
    drivers of a branch may come before its release: what counts is the oldest that NVIDIA lists for it. Of a
    Tegra's driver it is not known.
    """
    if versions.is_tegra(driver):
        return None
    known = [name for name, row in releases().items() if _brings(driver, row)]
    return known[-1] if known else None


@lru_cache(maxsize=4096)
def driver_runs(cuda: str, driver: str, told: str | None = None) -> bool:
    """Whether `driver` runs what was built with the CUDA release `cuda`, PTX aside.

    `told` is the oldest driver for it as a matrix states it, which counts where no table has the release.
    """
    if versions.is_tegra(driver):
        return False
    brought = driver_cuda(driver)
    if brought is not None and versions.order(brought) >= versions.order(cuda):
        return True
    floor = _floor(cuda) or (None if release(cuda) else told)
    return floor is not None and versions.order(driver) >= versions.order(floor)


def lowest_driver(cuda: str, told: str | None = None) -> str | None:
    """Return the oldest driver that NVIDIA lists for the CUDA release `cuda`, or `told` where unknown."""
    known = release(cuda)
    listed = (known and known.toolkit_driver, _floor(cuda))
    return min((driver for driver in listed if driver), key=versions.order, default=told)


def ptx_isa(driver: str) -> str | None:
    """Return the newest PTX ISA version that `driver` compiles, or None where its CUDA is not known."""
    brought = driver_cuda(driver)
    return None if brought is None else releases()[brought].ptx_isa


def _brings(driver: str, row: Release) -> bool:
    oldest = row.toolkit_driver or row.floor or "0"
    branch = row.branch is not None and row.branch <= versions.branch(driver)
    return branch and versions.order(oldest) <= versions.order(driver)


def _floor(cuda: str) -> str | None:
    floors: dict[str, str] = _data.load("cuda.json")["floors"]
    return floors.get(cuda.partition(".")[0])


def _release(name: str, row: dict[str, Any]) -> Release:
    return Release(
        name=name,
        toolkit_driver=row.get("toolkit_driver"),
        floor=_floor(name),
        branch=row.get("branch"),
        targets=frozenset(row["targets"].split()),
        ptx_isa=row.get("ptx_isa"),
        max_gcc=row.get("max_gcc"),
        max_clang=row.get("max_clang"),
    )
