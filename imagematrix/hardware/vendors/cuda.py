"""CUDA releases and the drivers that run them.

NVIDIA guarantees that a driver runs programs of its own CUDA release and of older ones. From CUDA 11 on, it
also runs programs of later releases with the same major version if it is not older than that major's floor
(minor-version compatibility). This does not cover PTX: a driver compiles only PTX up to its own CUDA release.
Sources are in cuda.json.
"""

from __future__ import annotations

from functools import cache, lru_cache
from types import MappingProxyType

from imagematrix.common.record import Record
from imagematrix.hardware.vendors import _data, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

COMPRESSED_FATBIN_DRIVER = "550.54.14"  # the oldest driver that reads the output of nvcc --compress-mode


class CudaRelease(Record):
    """A CUDA toolkit release such as "12.4", with its updates. Unknown facts are None.

    `toolkit_driver` is the oldest Linux driver that NVIDIA lists for one of its updates, `floor` the oldest
    for all releases of its major version. `branch` is the driver branch that introduced the release.
    `targets` are the cubins that its ptxas produces ("86", "90a"), none for a release that exists only in
    drivers. `ptx_isa` is the newest PTX ISA version that it supports, `max_gcc` and `max_clang` are the
    newest major versions that nvcc accepts as host compiler.
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
def load_releases() -> Mapping[str, CudaRelease]:
    """Return the known CUDA releases by name, oldest first."""
    table = _data.load("cuda.json")["releases"]
    releases = {
        name: CudaRelease(
            name=name,
            toolkit_driver=row.get("toolkit_driver"),
            floor=_get_floor(name),
            branch=row.get("branch"),
            targets=frozenset(row["targets"].split()),
            ptx_isa=row.get("ptx_isa"),
            max_gcc=row.get("max_gcc"),
            max_clang=row.get("max_clang"),
        )
        for name, row in table.items()
    }
    return MappingProxyType(releases)


def get_release(name: str) -> CudaRelease | None:
    """Return the CUDA release `name` ("12.4"), or None if it is unknown."""
    return load_releases().get(name)


@lru_cache(maxsize=1024)
def get_newest_cuda(driver: str) -> str | None:
    """Return the newest CUDA release that `driver` supports.

    The driver's branch decides, or else the newest known branch below it; the result is None below all known
    branches. Early drivers of a branch may precede its release, so a driver must not be older than the oldest
    that NVIDIA lists for the release. For a Tegra driver the release is unknown, and the result None.
    """
    if versions.is_tegra(driver):
        return None
    key = versions.make_sort_key(driver)
    drivers = list_first_drivers()
    supported = [name for name, first in drivers.items() if versions.make_sort_key(first) <= key]
    return supported[-1] if supported else None


@lru_cache(maxsize=4096)
def can_run_cuda(cuda: str, driver: str, stated: str | None = None) -> bool:
    """Whether `driver` runs programs of the CUDA release `cuda`, apart from PTX.

    `stated` is the oldest driver for it according to a matrix, used if the tables lack the release.
    """
    if versions.is_tegra(driver):
        return False
    supported = get_newest_cuda(driver)
    if supported is not None and versions.make_sort_key(supported) >= versions.make_sort_key(cuda):
        return True
    floor = _get_floor(cuda) or (None if get_release(cuda) else stated)
    return floor is not None and versions.make_sort_key(driver) >= versions.make_sort_key(floor)


def get_lowest_driver(cuda: str, stated: str | None = None) -> str | None:
    """Return the oldest driver that NVIDIA lists for the CUDA release `cuda`, or `stated` if unknown."""
    row = get_release(cuda)
    listed = (row and row.toolkit_driver, _get_floor(cuda))
    return min((driver for driver in listed if driver), key=versions.make_sort_key, default=stated)


@cache
def list_drivers() -> tuple[str, ...]:
    """Return the drivers that NVIDIA lists for some release, oldest first."""
    listed = {
        driver for row in load_releases().values() for driver in (row.toolkit_driver, row.floor) if driver
    }
    return tuple(sorted(listed, key=versions.make_sort_key))


def find_verdict_bounds(holds: Callable[[str | None], bool]) -> tuple[str, ...]:
    """Return the drivers at which a condition on what `get_newest_cuda` returns changes its verdict."""
    verdict, bounds = holds(None), []
    for name, first in list_first_drivers().items():
        if holds(name) is not verdict:
            verdict = not verdict
            bounds.append(first)
    return tuple(bounds)


@lru_cache(maxsize=256)
def find_driver_bounds(cuda: str, stated: str | None = None) -> tuple[str, ...]:
    """Return the drivers from which on `can_run_cuda` may give another verdict."""
    wanted = versions.make_sort_key(cuda)
    newer = find_verdict_bounds(
        lambda supported: supported is not None and versions.make_sort_key(supported) >= wanted
    )
    return tuple(filter(None, (*newer, _get_floor(cuda), stated)))


def get_newest_ptx_isa(driver: str) -> str | None:
    """Return the newest PTX ISA version that `driver` compiles, or None if its CUDA release is unknown."""
    supported = get_newest_cuda(driver)
    return None if supported is None else load_releases()[supported].ptx_isa


def list_drivers_that_compile(isas: Iterable[str]) -> list[str]:
    """Return the first drivers of the releases that compile PTX of one of these ISAs, oldest first."""
    least = min(map(versions.make_sort_key, isas))
    releases = load_releases()
    return [
        first
        for name, first in list_first_drivers().items()
        if versions.make_sort_key(releases[name].ptx_isa or "0") >= least
    ]


@cache
def list_first_drivers() -> Mapping[str, str]:
    """Return the first driver that supports each release, by the release's name, oldest first."""
    listed = {
        # From 13.0 on, NVIDIA lists a driver for the major version alone.
        name: max(row.toolkit_driver or row.floor or "0", f"{row.branch}.0", key=versions.make_sort_key)
        for name, row in load_releases().items()
        if row.branch is not None
    }
    return MappingProxyType(listed)


def _get_floor(cuda: str) -> str | None:
    floors: dict[str, str] = _data.load("cuda.json")["floors"]
    return floors.get(cuda.partition(".")[0])
