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
        points = {
            tuple(hosts.axes.items()): {axis: hosts.axes[axis] for axis in self.axes if axis in hosts.axes}
            for hosts in self.suited
        }
        return list(points.values())

    @cached_property
    def axes(self) -> dict[str, tuple[str, ...]]:
        """The axes with their values; an axis on which all cells have the usual value is left out."""
        values = {axis: {hosts.axes[axis] for hosts in self.suited if axis in hosts.axes} for axis in AXES}
        if values["platform"] == {"linux/amd64"}:
            del values["platform"]
        if values["cuda"] == {NO_CUDA}:
            del values["cuda"]

        def make_order_key(value: str) -> tuple[bool, tuple[Any, ...]]:
            return value != NO_CUDA, versions.make_natural_key(value)

        return {axis: tuple(sorted(words, key=make_order_key)) for axis, words in values.items() if words}

    @property
    def served_count(self) -> int:
        """The number of hosts that a cell serves."""
        return sum(len(hosts.kind.hosts) for hosts in self.suited)

    @property
    def unneeded_points(self) -> list[Mapping[str, str]]:
        """The feasible cells of the product of the axes that are not needed."""
        image = Image(name="matrix", version="v1", template="")
        properties = {"march": {"*": {"compiler": COMPILER}}}
        matrix = Matrix(path=Path(), templates=Path(), images=(image,), axes=self.axes, properties=properties)
        feasible = [cell.axes for cell in expand_matrix(matrix).cells if not find_infeasibility(cell)]
        return [point for point in feasible if point not in self.points]

    def count_hosts(self, axis: str, value: str) -> int:
        """Return the number of hosts whose cell has this value."""
        return sum(len(hosts.kind.hosts) for hosts in self.suited if hosts.axes.get(axis) == value)

    def list_hardware_names(self, axis: str, value: str) -> list[str]:
        """Return the names of the GPUs or CPUs of the hosts whose cell has this value, most hosts first."""
        counts: Counter[str] = Counter()
        for hosts in self.suited:
            if hosts.axes.get(axis) == value:
                host = hosts.kind.sample
                names = {gpu.name for gpu in host.gpus} if axis == "compute" else {host.cpu.model}
                printable = (sanitize_line(name) for name in names if name)
                counts.update(dict.fromkeys(printable, len(hosts.kind.hosts)))
        return [name for name, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


def propose_cells(hosts: Mapping[str, Host], *, releases: Sequence[str] = ()) -> ProposedCells:
    """Return the cells for a fleet, with the CUDA `releases`, or the fewest and newest that serve it.

    Raises UsageError if a release is unknown, or if no host can be served.
    """
    for name in releases:
        complaint = axis_values.check_value("cuda", name, MatrixFacts())
        if complaint or not (row := cuda.get_release(name)) or not row.targets:
            toolkits = [release for release, row in cuda.load_releases().items() if row.targets]
            remedy = suggest_nearest(name, toolkits) or f"the tables have {toolkits[0]} to {toolkits[-1]}"
            raise UsageError(f"unknown CUDA release {name!r}", remedy=remedy)

    fleet = group_by_hardware(hosts, Selector(_make_catalog(()), keep=len(hosts)).explain)
    # The feasible cells that fit each kind of hardware, with its best march and one driver.
    possible: dict[int, list[Cell]] = {}
    for kind in fleet:
        feasible = [cell for cell in _generate_cells(kind, releases) if not find_infeasibility(cell)]
        catalog = _make_catalog(feasible)
        fits = Selector(catalog).explain(kind.sample).fits
        pairs = zip(catalog.variants, feasible, strict=True)
        fitting = [cell for variant, cell in pairs if variant.reference in fits]
        possible[id(kind)] = [cell for cell in fitting if cell.driver == fitting[0].driver]
    chosen = _choose_releases(fleet, possible)
    suited, misses = [], []
    for kind in fleet:
        cells = [cell for cell in possible[id(kind)] if cell.axes["cuda"] in chosen]
        best = _choose_for_host(cells, kind.sample, gpus=None)
        if best:
            suited.append(SuitedHosts(kind=kind, axes=best.axes))
        else:
            misses.append((_find_nearest_miss(kind, releases), kind.hosts))
    return ProposedCells(suited=tuple(suited), unserved=group_unserved(misses), stated=tuple(releases))


def _make_catalog(cells: Iterable[Cell]) -> Catalog:
    return Catalog(image="matrix", version="v1", variants=tuple(map(promise_variant, cells)))


def _make_cell(**axes: str) -> Cell:
    image = Image(name="matrix", version="v1", template="")
    return Cell(image=image, axes=axes, properties={"compiler": COMPILER})


def _find_nearest_miss(kind: HardwareKind, releases: Sequence[str]) -> Miss:
    """Return why no cell serves a kind of hardware."""
    cells = _generate_cells(kind, releases)
    if not cells:  # none can even be named
        platform = Target(host=kind.sample, gpus=()).platform
        why = "no CUDA release of the tables has code for its GPUs"
        if platform not in ARCHES:
            why = f"images are made for {' and '.join(ARCHES)}, and it runs {platform}"
        elif _choose_march(kind.sample, platform) is None:
            why = f"no value of -march of {COMPILER} suits its CPUs"
        return Miss(why=why, remedy=None)

    verdicts = [find_infeasibility(cell) for cell in cells]
    feasible = [cell for cell, infeasible in zip(cells, verdicts, strict=True) if not infeasible]
    reasons = [infeasible for infeasible in verdicts if infeasible]
    if reasons and not feasible:
        # Of a release with code for the GPUs, the oldest one is nearest.
        other_reasons = [reason for reason in reasons if reason.rule != "toolkit-target"]
        return Miss(why=(other_reasons[-1] if other_reasons else reasons[0]).why, remedy=None)
    miss = Selector(_make_catalog(feasible)).explain(kind.sample).miss
    assert miss is not None  # noqa: S101 - one that fits would suit; for the type checker
    return replace(miss, nearest=None)


def _generate_cells(kind: HardwareKind, releases: Sequence[str]) -> list[Cell]:
    """Return all cells that could be made for a kind of hardware, feasible or not."""
    host = kind.sample
    platform = Target(host=host, gpus=()).platform
    march = _choose_march(host, platform)
    if march is None:
        return []
    common = {"platform": platform}
    if not host.gpus:
        return [_make_cell(**common, cuda=NO_CUDA, march=march)]
    # A driver in the image comes first. Virtual GPUs may only work with that of the node.
    installed = [host.driver.version] if host.driver else []
    drivers = [
        version for version in installed if not axis_values.check_value("driver", version, MatrixFacts())
    ]
    names = releases or [name for name, row in cuda.load_releases().items() if row.targets]
    return [
        _make_cell(**common, cuda=release, driver=driver, compute=compute, march=march)
        for driver in (*drivers, axis_values.HOST_DRIVER)
        for release in reversed(names)
        for compute in reversed(_list_computes(host))
    ]


def _list_computes(host: Host) -> list[str]:
    """Return the capabilities whose code runs on all GPUs of a host; all GPUs' own if none does."""
    gpu_computes = {gpu.compute for gpu in host.gpus if gpu.compute}
    plain = [compute for compute in device_code.list_capability_words() if compute[-1] not in "af"]
    common = [
        compute
        for compute in plain
        if gpu_computes
        and all(device_code.can_run_cubin(device_code.make_target(compute), gpu) for gpu in gpu_computes)
    ]
    return common or sorted(gpu_computes.intersection(plain))


def _choose_march(host: Host, platform: str) -> str | None:
    """Return the value of -march whose code suits the CPUs of a host best, or None if none does."""
    known = marches.list_known_names(COMPILER) or frozenset()
    cells = [
        _make_cell(platform=platform, cuda=NO_CUDA, march=march)
        for march in sorted(known)
        if ARCHES.get(platform) == marches.get_arch(march)
        and not axis_values.check_value("march", march, MatrixFacts())
    ]
    best = _choose_for_host(cells, host, gpus="none")
    return best.axes["march"] if best else None


def _choose_for_host(cells: Sequence[Cell], host: Host, *, gpus: str | None) -> Cell | None:
    """Return the cell that a host would choose, or None."""
    catalog = _make_catalog(cells)
    pairs = zip(catalog.variants, cells, strict=True)
    by_reference = {variant.reference: cell for variant, cell in pairs}
    ranked = Selector(catalog).explain(host, gpus=gpus).decision.ranked
    return by_reference[ranked[0].reference] if ranked else None


def _choose_releases(fleet: Iterable[HardwareKind], possible: Mapping[int, Sequence[Cell]]) -> set[str]:
    """Return few CUDA releases that serve all kinds: always the one that serves the most other hosts.

    Of equal ones, the newest is taken.
    """
    unserved = [
        (len(kind.hosts), {cell.axes["cuda"] for cell in possible[id(kind)]} - {NO_CUDA}) for kind in fleet
    ]
    chosen = {NO_CUDA}
    while True:
        unserved = [(hosts, names) for hosts, names in unserved if names and not names & chosen]
        if not unserved:
            return chosen
        counts: Counter[str] = Counter()
        for hosts, names in unserved:
            counts.update(dict.fromkeys(names, hosts))
        chosen.add(max(counts, key=lambda name: (counts[name], versions.make_sort_key(name))))
