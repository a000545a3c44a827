"""The guards of all files with device code in an image, from the sources of the packages that own them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby

from imagematrix.audit.guards import guards
from imagematrix.audit.guards.evaluation import StepBudget
from imagematrix.hardware.vendors import device_code
from imagematrix.images.catalog.catalog import UseGuard

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from imagematrix.audit.binaries.device_code import DeviceCode
    from imagematrix.audit.guards.guards import SourceGuard
    from imagematrix.audit.images.layer import PlainFile
    from imagematrix.audit.images.python_packages import Package
    from imagematrix.images.oci.tree import ImageTree


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedCode:
    """A file with device code that decides, with the Python package that installed it, and its soname."""

    path: str
    package: Package | None
    code: DeviceCode
    soname: str | None = None

    def has(self, compute: str, *, compiled: bool = False) -> bool:
        """Whether it has code for GPUs of a capability, if `compiled` a cubin."""
        cubins = any(device_code.cubin_runs(own, compute) for own in self.code.cubins)
        return cubins or (
            not compiled and any(device_code.ptx_runs(target, compute) for target, _ in self.code.ptx)
        )


def find_source_guards(
    files: Sequence[PackagedCode], needed: AbstractSet[str | None], tree: ImageTree[PlainFile]
) -> dict[str, UseGuard]:
    """Return the guards of files by path.

    `needed` are the names of the libraries that some file needs by its dynamic section: the loader takes them
    on every GPU. A file is exempt only where another file of its package has code.
    """
    found: dict[str, UseGuard] = {}
    budget = StepBudget(guards.STEPS)
    by_package: dict[str, list[PackagedCode]] = {}
    for file in files:
        if file.package:
            by_package.setdefault(file.package.metadata, []).append(file)
    for own in by_package.values():
        having = Counter(
            compute for file in own for compute in device_code.list_capabilities() if file.has(compute)
        )
        lacking = [file for file in own if _may_be_exempt(file, having, needed)]
        package = own[0].package
        if lacking and package:
            names = {file.path.removeprefix(f"{package.folder}/"): file for file in own}
            told = guards.find_guards(_sources(package, tree), names, device_code.list_capabilities(), budget)
            found |= dict(_exempting(own, lacking, {names[name].path: guard for name, guard in told.items()}))
    return found


def _may_be_exempt(file: PackagedCode, having: Mapping[str, int], needed: AbstractSet[str | None]) -> bool:
    """Whether no file needs a file, and it lacks cubins where another of its package has code.

    `having` are the numbers of files of the package with code for a capability.
    """
    if needed & {file.path.rpartition("/")[2], file.soname}:
        return False
    return any(
        not file.has(compute, compiled=True) and number > file.has(compute)
        for compute, number in having.items()
    )


def _sources(package: Package, tree: ImageTree[PlainFile]) -> Mapping[str, bytes]:
    """Return the sources of a package that the audit keeps, by their paths from its folder."""
    found = ((path, tree.find(path)) for path in sorted(package.files) if path.endswith(".py"))
    return {
        path.removeprefix(f"{package.folder}/"): file[1].text
        for path, file in found
        if file and file[1].text is not None
    }


def _exempting(
    own: Sequence[PackagedCode], lacking: Sequence[PackagedCode], told: Mapping[str, SourceGuard]
) -> Iterator[tuple[str, UseGuard]]:
    """Yield the path and the guard of each file that has one."""
    unused = {
        file.path: frozenset(device_code.list_capabilities()) - told[file.path].used
        for file in lacking
        if file.path in told
    }
    running = {
        compute
        for compute in device_code.list_capabilities()
        if any(file.has(compute) and compute not in unused.get(file.path, ()) for file in own)
    }
    for path, without in unused.items():
        line = told[path].line
        yield path, UseGuard(path=line.path, line=line.line, unless=tuple(_ranges(without & running)))


def _ranges(computes: Collection[str]) -> Iterator[tuple[str, str | None]]:
    """Yield capabilities as pairs of the lowest and the highest of those that follow each other."""
    every = device_code.list_capabilities()
    for within, group in groupby(every, lambda compute: compute in computes):
        listed = list(group)
        if within:
            yield listed[0], None if listed[-1] == every[-1] else listed[-1]
