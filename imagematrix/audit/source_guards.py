"""The guards of all files with device code in an image, from the sources of the packages that own them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby

from imagematrix.audit.guards import guards
from imagematrix.audit.guards.evaluation import StepBudget
from imagematrix.common.groups import group_values
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

    def has_code(self, compute: str, *, compiled: bool = False) -> bool:
        """Whether it has code for GPUs of a capability, if `compiled` a cubin."""
        cubins = any(device_code.can_run_cubin(cubin, compute) for cubin in self.code.cubins)
        return cubins or (
            not compiled and any(device_code.can_compile_ptx(target, compute) for target, _ in self.code.ptx)
        )


def find_source_guards(
    files: Sequence[PackagedCode], needed: AbstractSet[str | None], tree: ImageTree[PlainFile]
) -> dict[str, UseGuard]:
    """Return the guards of files by path.

    `needed` are the names of the libraries that some file needs by its dynamic section: the loader takes them
    on every GPU. A file is exempt only where another file of its package has code.
    """
    use_guards: dict[str, UseGuard] = {}
    budget = StepBudget(guards.STEPS)
    by_package = group_values((file.package.metadata, file) for file in files if file.package)
    for members in by_package.values():
        counts = Counter(
            compute
            for file in members
            for compute in device_code.list_capabilities()
            if file.has_code(compute)
        )
        # Those that no file needs, and that lack cubins where another file of the package has code.
        lacking = [
            file
            for file in members
            if not needed & {file.path.rpartition("/")[2], file.soname}
            and any(
                not file.has_code(compute, compiled=True) and count > file.has_code(compute)
                for compute, count in counts.items()
            )
        ]
        package = members[0].package
        if lacking and package:
            by_source_path = {file.path.removeprefix(f"{package.folder}/"): file for file in members}
            sources = _read_sources(package, tree)
            by_name = guards.find_guards(sources, by_source_path, device_code.list_capabilities(), budget)
            by_path = {by_source_path[name].path: guard for name, guard in by_name.items()}
            use_guards |= dict(_list_exemptions(members, lacking, by_path))
    return use_guards


def _read_sources(package: Package, tree: ImageTree[PlainFile]) -> Mapping[str, bytes]:
    """Return the sources of a package that the audit keeps, by their paths from its folder."""
    files = ((path, tree.find(path)) for path in sorted(package.files) if path.endswith(".py"))
    return {
        path.removeprefix(f"{package.folder}/"): file[1].text
        for path, file in files
        if file and file[1].text is not None
    }


def _list_exemptions(
    files: Sequence[PackagedCode], lacking: Sequence[PackagedCode], by_path: Mapping[str, SourceGuard]
) -> Iterator[tuple[str, UseGuard]]:
    """Yield the path and the guard of each file that has one."""
    unused = {
        file.path: frozenset(device_code.list_capabilities()) - by_path[file.path].used
        for file in lacking
        if file.path in by_path
    }
    running = {
        compute
        for compute in device_code.list_capabilities()
        if any(file.has_code(compute) and compute not in unused.get(file.path, ()) for file in files)
    }
    for path, computes in unused.items():
        line = by_path[path].line
        ranges = tuple(_join_ranges(computes & running))
        yield path, UseGuard(path=line.path, line=line.line, unless=ranges)


def _join_ranges(computes: Collection[str]) -> Iterator[tuple[str, str | None]]:
    """Yield capabilities as pairs of the lowest and the highest of those that follow each other."""
    capabilities = device_code.list_capabilities()
    for is_member, group in groupby(capabilities, lambda compute: compute in computes):
        members = list(group)
        if is_member:
            yield members[0], None if members[-1] == capabilities[-1] else members[-1]
