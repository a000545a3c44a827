"""The cells that suit the hosts of a fleet best, of all that the vendors' tables allow."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from imagematrix.build.matrix import axis_values
from imagematrix.build.matrix.expand import expand_matrix
from imagematrix.build.matrix.feasibility import ARCHES, find_infeasibility
from imagematrix.build.matrix.matrix import NO_CUDA, Cell, Image, Matrix
from imagematrix.build.matrix.matrix_facts import MatrixFacts
from imagematrix.build.matrix.promised_variants import promise_variant
from imagematrix.common.record import replace
from imagematrix.common.suggestions import suggest_nearest
from imagematrix.errors import UsageError, sanitize_line
from imagematrix.hardware.vendors import cuda, device_code, marches, versions
from imagematrix.images.catalog.catalog import Catalog
from imagematrix.selection.fleet.hardware_kinds import group_by_hardware
from imagematrix.selection.fleet.unserved_hosts import group_unserved
from imagematrix.selection.miss import Miss
from imagematrix.selection.selection_target import Target
from imagematrix.selection.selector import Selector

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from imagematrix.hardware.host.host import Host
    from imagematrix.selection.fleet.hardware_kinds import HardwareKind
    from imagematrix.selection.fleet.unserved_hosts import UnservedHosts

COMPILER = "gcc-14"  # whose values of -march are proposed
AXES = ("platform", "cuda", "driver", "compute", "march")


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitedHosts:
    """Hosts of one kind, and the values of the axes of the cell that suits them best."""

    kind: HardwareKind
    axes: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)  # without slots, because names are cached
class ProposedCells:
    """The cells for a fleet, by kind of hardware, and the hosts that no cell can serve.

    `stated` are the CUDA releases that were asked for, if any.
    """

    suited: tuple[SuitedHosts, ...]
    unserved: tuple[UnservedHosts, ...]
    stated: tuple[str, ...] = ()

    @cached_property
    def points(self) -> list[dict[str, str]]:
        """The needed cells, by their values on the axes."""
        found = {
            tuple(one.axes.items()): {axis: one.axes[axis] for axis in self.axes if axis in one.axes}
            for one in self.suited
        }
        return list(found.values())

    @cached_property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """The axes with their values; an axis on which all cells have the usual value is left out."""
        values = {axis: {one.axes[axis] for one in self.suited if axis in one.axes} for axis in AXES}
        if values["platform"] == {"linux/amd64"}:
            del values["platform"]
        if values["cuda"] == {NO_CUDA}:
            del values["cuda"]
        return {axis: tuple(sorted(some, key=_order_key)) for axis, some in values.items() if some}

    @property
    def served(self) -> int:
        """The number of hosts that a cell serves."""
        return sum(len(one.kind.hosts) for one in self.suited)

    @property
    def unneeded_points(self) -> list[Mapping[str, str]]:
        """The feasible cells of the product of the axes that are not needed."""
        image = Image(name="matrix", version="v1", template="")
        properties = {"march": {"*": {"compiler": COMPILER}}}
        matrix = Matrix(path=Path(), templates=Path(), images=(image,), axes=self.axes, properties=properties)
        feasible = [cell.axes for cell in expand_matrix(matrix).cells if not find_infeasibility(cell)]
        return [point for point in feasible if point not in self.points]

    def hosts(self, axis: str, value: str) -> int:
        """Return the number of hosts whose cell has this value."""
        return sum(len(one.kind.hosts) for one in self.suited if one.axes.get(axis) == value)

    def names(self, axis: str, value: str) -> list[str]:
        """Return the names of the GPUs or CPUs of the hosts whose cell has this value, most hosts first."""
        counts: Counter[str] = Counter()
        for one in self.suited:
            if one.axes.get(axis) == value:
                host = one.kind.sample
                found = {gpu.name for gpu in host.gpus} if axis == "compute" else {host.cpu.model}
                counts.update(
                    dict.fromkeys((sanitize_line(name) for name in found if name), len(one.kind.hosts))
                )
        return [name for name, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


def propose_cells(hosts: Mapping[str, Host], *, releases: Sequence[str] = ()) -> ProposedCells:
    """Return the cells for a fleet, with the CUDA `releases`, or the fewest and newest that serve it.

    Raises UsageError if a release is unknown, or if no host can be served.
    """
    for name in releases:
        _require_known(name)
    fleet = group_by_hardware(hosts, Selector(_catalog(()), keep=len(hosts)).explain)
    possible = {id(kind): _find_suiting_cells(kind, releases) for kind in fleet}
    chosen = _choose_releases(fleet, possible)
    suited, misses = [], []
    for kind in fleet:
        cells = [cell for cell in possible[id(kind)] if cell.axes["cuda"] in chosen]
        best = _choose_for_kind(kind, cells)
        if best:
            suited.append(SuitedHosts(kind=kind, axes=best.axes))
        else:
            misses.append((_find_nearest_miss(kind, releases), kind.hosts))
    return ProposedCells(suited=tuple(suited), unserved=group_unserved(misses), stated=tuple(releases))


def _require_known(name: str) -> None:
    complaint = axis_values.check_value("cuda", name, MatrixFacts())
    if complaint or not (row := cuda.get_release(name)) or not row.targets:
        toolkits = [release for release, row in cuda.load_releases().items() if row.targets]
        remedy = suggest_nearest(name, toolkits) or f"the tables have {toolkits[0]} to {toolkits[-1]}"
        raise UsageError(f"unknown CUDA release {name!r}", remedy=remedy)


def _catalog(cells: Iterable[Cell]) -> Catalog:
    return Catalog(image="matrix", version="v1", variants=tuple(map(promise_variant, cells)))


def _cell(**axes: str) -> Cell:
    image = Image(name="matrix", version="v1", template="")
    return Cell(image=image, axes=axes, properties={"compiler": COMPILER})


def _find_suiting_cells(kind: HardwareKind, releases: Sequence[str]) -> list[Cell]:
    """Return the feasible cells that fit a kind of hardware, with its best march and one driver."""
    cells = [cell for cell in _generate_cells(kind, releases) if not find_infeasibility(cell)]
    catalog = _catalog(cells)
    fits = Selector(catalog).explain(kind.sample).fits
    fitting = [cell for one, cell in zip(catalog.variants, cells, strict=True) if one.reference in fits]
    return [cell for cell in fitting if cell.driver == fitting[0].driver]


def _find_nearest_miss(kind: HardwareKind, releases: Sequence[str]) -> Miss:
    """Return why no cell serves a kind of hardware."""
    cells = _generate_cells(kind, releases)
    if not cells:
        return Miss(why=_explain_without_cell(kind.sample), remedy=None)
    feasible = [cell for cell in cells if not find_infeasibility(cell)]
    impossible = [why for cell in cells if (why := find_infeasibility(cell))]
    if impossible and not feasible:
        # Of a release with code for the GPUs, the oldest one is nearest.
        others = [why for why in impossible if why.rule != "toolkit-target"]
        return Miss(why=(others[-1] if others else impossible[0]).why, remedy=None)
    found = Selector(_catalog(feasible)).explain(kind.sample).miss
    assert found is not None  # noqa: S101 - one that fits would suit; for the type checker
    return replace(found, nearest=None)


def _explain_without_cell(host: Host) -> str:
    """Return why no cell can even be named for a host."""
    platform = Target(host=host, gpus=()).platform
    if platform not in ARCHES:
        return f"images are made for {' and '.join(ARCHES)}, and it runs {platform}"
    if _choose_march(host, platform) is None:
        return f"no value of -march of {COMPILER} suits its CPUs"
    return "no CUDA release of the tables has code for its GPUs"


def _generate_cells(kind: HardwareKind, releases: Sequence[str]) -> list[Cell]:
    """Return all cells that could be made for a kind of hardware, feasible or not."""
    host = kind.sample
    platform = Target(host=host, gpus=()).platform
    march = _choose_march(host, platform)
    if march is None:
        return []
    common = {"platform": platform}
    if not host.gpus:
        return [_cell(**common, cuda=NO_CUDA, march=march)]
    # A driver in the image comes first. Virtual GPUs may only work with that of the node.
    own = [host.driver.version] if host.driver else []
    drivers = [version for version in own if not axis_values.check_value("driver", version, MatrixFacts())]
    names = releases or [name for name, row in cuda.load_releases().items() if row.targets]
    return [
        _cell(**common, cuda=release, driver=driver, compute=compute, march=march)
        for driver in (*drivers, axis_values.HOST_DRIVER)
        for release in reversed(names)
        for compute in reversed(_list_computes(host))
    ]


def _list_computes(host: Host) -> list[str]:
    """Return the capabilities whose code runs on all GPUs of a host; all GPUs' own if none does."""
    own = {gpu.compute for gpu in host.gpus if gpu.compute}
    plain = [compute for compute in device_code.list_capability_words() if compute[-1] not in "af"]
    able = [
        compute
        for compute in plain
        if own and all(device_code.cubin_runs(device_code.make_target(compute), each) for each in own)
    ]
    return able or sorted(own.intersection(plain))


def _choose_march(host: Host, platform: str) -> str | None:
    """Return the value of -march whose code suits the CPUs of a host best, or None if none does."""
    known = marches.list_known_names(COMPILER) or frozenset()
    cells = [
        _cell(platform=platform, cuda=NO_CUDA, march=march)
        for march in sorted(known)
        if ARCHES.get(platform) == marches.get_arch(march)
        and not axis_values.check_value("march", march, MatrixFacts())
    ]
    best = _choose_for_host(cells, host, gpus="none")
    return best.axes["march"] if best else None


def _choose_for_kind(kind: HardwareKind, cells: Sequence[Cell]) -> Cell | None:
    return _choose_for_host(cells, kind.sample, gpus=None)


def _choose_for_host(cells: Sequence[Cell], host: Host, *, gpus: str | None) -> Cell | None:
    """Return the cell that a host would choose, or None."""
    catalog = _catalog(cells)
    by_reference = {one.reference: cell for one, cell in zip(catalog.variants, cells, strict=True)}
    ranked = Selector(catalog).explain(host, gpus=gpus).decision.ranked
    return by_reference[ranked[0].reference] if ranked else None


def _choose_releases(fleet: Iterable[HardwareKind], possible: Mapping[int, Sequence[Cell]]) -> set[str]:
    """Return few CUDA releases that serve all kinds: always the one that serves the most other hosts.

    Of equal ones, the newest is taken.
    """
    left = {
        id(kind): (len(kind.hosts), {cell.axes["cuda"] for cell in possible[id(kind)]} - {NO_CUDA})
        for kind in fleet
    }
    chosen = {NO_CUDA}
    while True:
        left = {key: (hosts, names) for key, (hosts, names) in left.items() if names and not names & chosen}
        if not left:
            return chosen
        counts: Counter[str] = Counter()
        for hosts, names in left.values():
            counts.update(dict.fromkeys(names, hosts))
        chosen.add(max(counts, key=lambda name: (counts[name], versions.make_sort_key(name))))


def _order_key(value: str) -> tuple[bool, tuple[Any, ...]]:
    return value != NO_CUDA, versions.make_natural_key(value)
