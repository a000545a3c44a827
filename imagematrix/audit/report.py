"""The Audit of an image: everything that its bytes prove, for the document and for catalog entries."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, replace

from imagematrix.audit.binaries import alternatives, elf, nvidia_names
from imagematrix.audit.binaries.device_code import NONE, merge_device_code
from imagematrix.audit.binaries.driver_file import DriverLibrary
from imagematrix.audit.images import device_code_entries, libraries
from imagematrix.audit.images.code_roles import DECIDES, OPTIONAL, TESTS, UNUSED, CodedFile, assign_roles
from imagematrix.audit.images.contents import list_contents
from imagematrix.audit.images.loader import Loader
from imagematrix.audit.images.python_packages import STACKS, get_stack_release, get_version, list_packages
from imagematrix.audit.source_guards import PackagedCode, find_source_guards
from imagematrix.hardware.host.host import get_machine_name
from imagematrix.hardware.vendors import guarded_files, marches, user_mode
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import BYTES, SOURCE, TABLE
from imagematrix.images.oci.tree import ImageTree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from imagematrix.audit.binaries.device_code import DeviceCode
    from imagematrix.audit.binaries.host_code import HostCode
    from imagematrix.audit.binaries.objects import File
    from imagematrix.audit.images.code_roles import CodeRoles
    from imagematrix.audit.images.contents import Contents
    from imagematrix.audit.images.image import AuditedImage
    from imagematrix.audit.images.layer import PlainFile
    from imagematrix.audit.images.libraries import Library
    from imagematrix.audit.images.python_packages import Package
    from imagematrix.images.catalog.catalog import Code, UseGuard

BASELINE = "x86-64-v1"
HWCAPS = "glibc-hwcaps"
INNER = "!/"
LOOSE = ".cubin"
TEST_FOLDERS = frozenset({"test", "tests"})
# Why device code counts for nothing: a linker has yet to take it, or by the role of its file.
UNLINKED = "it is for linking"
UNCOUNTED = {
    UNUSED: "of the files for several CUDA releases, another one is for the image's release",
    TESTS: "it is test data of a package",
}
STATED = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,63}", re.ASCII)  # a version, also after "openmpi-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminedFile:
    """An examined file with its path and its layer. `nvidia` says why it is NVIDIA's, or None.

    `package` is the Python package that installed it. `name` is its path in that package or in the archive
    that contains it, or else `path`. `role` says whether its device code counts; see `assign_roles`.
    `is_listed`: it is in the table of files that some GPUs do not use, see `guarded_files`. `guard` is the
    question that its package's sources ask before they use it.
    """

    path: str
    layer: str
    file: File
    nvidia: str | None
    name: str
    package: str | None = None
    role: str = DECIDES
    is_listed: bool = False
    guard: UseGuard | None = None

    @property
    def is_own(self) -> bool:
        """Whether it belongs to the image's programs, and is no file of NVIDIA's."""
        return self.nvidia is None

    @property
    def is_test(self) -> bool:
        """Whether it is test data of its package, by the folders in which it is."""
        return self.package is not None and not TEST_FOLDERS.isdisjoint(self.name.split("/")[:-1])

    @property
    def uncounted_reason(self) -> str | None:
        """Why its device code for NVIDIA's GPUs counts for nothing; None if it counts, or if it has none."""
        if not self.file.code.cuda:
            return None
        return self.nvidia or (None if _is_loadable(self.file) else UNLINKED) or UNCOUNTED.get(self.role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Device code for NVIDIA's GPUs of which some has to run: a file's, or that of a package's loose cubins.

    A program loads one of the cubins by its name. `files` is their number, `globs` match them, `path` and
    `name` are those of the first.
    """

    path: str
    name: str
    code: DeviceCode
    role: str
    files: int = 1
    globs: tuple[str, ...] = ()
    guard: UseGuard | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFile:
    """A library of the user-mode driver at a path. `loaded`: the loader takes this file for the library."""

    path: str
    driver: DriverLibrary
    loaded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A framework: the facts that its package states, and the targets of the cubins in its files.

    `stated_version` is the version that its files state, `version` that of its metadata.
    """

    name: str
    version: str
    stated_version: str
    cuda: str | None
    arch_list: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The contents of an image, sorted by path.

    `cubins` and `ptx` hold for all files whose device code decides, `device_code` has the entries of files.
    `release` is the CUDA release that is taken because of files for several; see `assign_roles`. `unmatched`
    are the globs of optional files that match none. `for_cuda` are the Python packages that are only for GPUs
    with CUDA: their metadata show it, or they bring libraries of NVIDIA's.
    """

    image: AuditedImage
    files: tuple[ExaminedFile, ...]
    units: tuple[Unit, ...]
    contents: Contents
    drivers: tuple[DriverFile, ...]
    libraries: tuple[Library, ...]
    stacks: tuple[Stack, ...]
    cubins: tuple[str, ...]
    ptx: tuple[tuple[str, str], ...]
    compressed: bool
    objects: tuple[str, ...]
    isa: tuple[tuple[str, str], ...]
    device_code: tuple[Code, ...] = ()
    release: str | None = None
    unmatched: tuple[str, ...] = ()
    for_cuda: frozenset[str] = frozenset()

    @property
    def coded_files(self) -> Iterator[ExaminedFile]:
        """The files with device code that the image may use."""
        return filter(_counts, self.files)

    @property
    def gpu_code(self) -> Iterator[Unit]:
        """The device code for NVIDIA's GPUs that decides which targets the image covers."""
        return (unit for unit in self.units if unit.role == DECIDES)

    @property
    def source(self) -> str:
        """What tells which files each GPU needs: the bytes alone, packages' sources, or the table."""
        if any(unit.guard and unit.guard.unless for unit in self.gpu_code):
            return SOURCE
        return (
            TABLE
            if any(examined.is_listed and examined.file.code.cuda for examined in self.coded_files)
            else BYTES
        )

    @property
    def toolkits(self) -> dict[str, str]:
        """The CUDA releases whose compilers made cubins in the image, each with the path of one file."""
        paths: dict[str, str] = {}
        for examined in self.coded_files:
            paths.update(dict.fromkeys(examined.file.code.toolkits - paths.keys(), examined.path))
        return paths

    @property
    def versions(self) -> tuple[tuple[str, str | None], ...]:
        """The frameworks and the libraries through which ranks talk, each with its version, sorted.

        The versions of several copies are joined by commas. It is None if that of a copy is unknown.
        """
        by_name: dict[str, set[str | None]] = {}
        frameworks = ((framework.name, framework.stated_version) for framework in self.stacks)
        for name, version in (*libraries.list_communication_libraries(self.libraries), *frameworks):
            is_version = version and STATED.fullmatch(version)
            by_name.setdefault(name, set()).add(version if is_version else None)

        joined: list[tuple[str, str | None]] = []
        for name, versions in by_name.items():
            known = [version for version in versions if version]
            joined.append((name, ",".join(sorted(known)) if len(known) == len(versions) else None))
        return tuple(sorted(joined))

    @property
    def programs(self) -> Iterator[ExaminedFile]:
        """The image's own files with CPU code: those that no package of the distribution installed."""
        return (
            examined
            for examined in self.files
            if examined.is_own
            and examined.file.linked
            and not examined.file.packaged
            and examined.file.machine not in (None, elf.CUDA)
            and INNER not in examined.path
        )

    @property
    def is_decided(self) -> bool:
        """Whether the CPU requirements of all programs are known."""
        return all(
            examined.file.host is not None
            and examined.file.host.whole
            and not (examined.file.host.undecided_flags or examined.file.damaged)
            for examined in self.programs
        )

    @property
    def contained_flags(self) -> frozenset[str]:
        """The CPU flags of all instructions in programs, required or not."""
        return frozenset(
            flag for examined in self.programs if examined.file.host for flag in examined.file.host.functions
        )

    @property
    def flags(self) -> dict[str, str]:
        """The CPU flags that notes or instructions prove to be required, each with the path of one file."""
        levels = dict(marches.LEVELS)
        proof = self._find_paths(lambda host: host.required)
        for level, path in self.isa:
            rank = marches.get_level_rank(level)
            for name, flags in levels.items():
                if marches.get_level_rank(name) <= rank:
                    proof.update(dict.fromkeys(flags - proof.keys(), path))
        return proof

    @property
    def probable_flags(self) -> dict[str, str]:
        """The CPU flags that are probably required, without those that are proven; see HostCode."""
        known = self.flags
        paths = self._find_paths(lambda host: host.probable)
        return {flag: path for flag, path in paths.items() if flag not in known}

    @property
    def partial_flags(self) -> dict[str, str]:
        """The CPU flags that much of a file needs, without those that are required or probable."""
        known = self.flags | self._find_paths(lambda host: host.probable)
        paths = self._find_paths(lambda host: host.partial)
        return {flag: path for flag, path in paths.items() if flag not in known}

    def _find_paths(self, flags_of: Callable[[HostCode], frozenset[str]]) -> dict[str, str]:
        """Return the CPU flags that `flags_of` returns for programs, each with the path of one file."""
        paths: dict[str, str] = {}
        for examined in self.programs:
            if examined.file.host:
                paths.update(dict.fromkeys(flags_of(examined.file.host) - paths.keys(), examined.path))
        return paths


def requires_level(file: File) -> bool:
    """Whether a file's notes require more than the first CPU level, which every CPU has."""
    return file.isa not in (None, BASELINE)


def audit_image(image: AuditedImage, optional: Sequence[str] = ()) -> Audit:
    """Return the audit of an image, from the files that its containers would see; raise AuditError.

    `optional` are globs of files with device code that some GPUs do not use, besides those in the labels.
    """
    tree = ImageTree(image.layers)
    installed, damaged = list_packages(tree, get_machine_name("".join(image.platform.split("/")[1:2])))
    owners, versions = _find_owners(installed)
    files = sorted(_list_files(tree, owners, versions), key=lambda examined: examined.path)
    listed = tuple(
        library
        for examined in files
        for library in libraries.list_libraries(examined.path, examined.file, versions)
    )

    globs = tuple(dict.fromkeys((*optional, *labels.read_optional(image.labels))))
    files, roles = _assign_roles(_relax_alternatives(files), listed, globs)
    files = _add_guards(files, owners, tree)
    used = [*filter(_counts, files)]
    units = tuple(_list_units(examined for examined in used if examined.file.code.cuda))
    deciding = [unit for unit in units if unit.role == DECIDES]
    codes = [unit.code for unit in deciding]

    drivers = tuple(_list_drivers(tree, files, image.environment))
    # No metadata lists NVIDIA's shared libraries and the parts of its driver.
    unlisted = [
        (library.name, library.version, library.path)
        for library in listed
        if library.nvidia and not library.static
    ]
    unlisted += [(part.driver.name, part.driver.version, part.path) for part in drivers]
    return Audit(
        image=image,
        files=tuple(files),
        units=units,
        contents=list_contents(tree, installed, unlisted, damaged),
        drivers=drivers,
        libraries=listed,
        stacks=_list_stacks(installed, files, tree),
        cubins=tuple(device_code_entries.find_common_cubins(codes, [unit.guard for unit in deciding])),
        ptx=tuple(device_code_entries.find_common_ptx(codes)),
        device_code=device_code_entries.join_entries(map(_make_entry, units)),
        release=roles.release,
        unmatched=roles.unmatched,
        for_cuda=frozenset(
            [package.name for package in installed if package.for_cuda]
            + [examined.package for examined in files if examined.package and not examined.is_own]
        ),
        compressed=any(examined.file.code.compressed for examined in used),
        objects=tuple(sorted({target for examined in used for target in examined.file.code.objects})),
        # The loader takes files in glibc-hwcaps folders only on CPUs that can run them.
        isa=tuple(
            (examined.file.isa, examined.path)
            for examined in files
            if examined.file.isa and requires_level(examined.file) and HWCAPS not in examined.path.split("/")
        ),
    )


def _find_owners(installed: Iterable[Package]) -> tuple[dict[str, Package], dict[str, str]]:
    """Return the packages by the paths that they list, and the versions of NVIDIA's libraries by theirs."""
    libraries_only = {
        package.metadata
        for package in installed
        if nvidia_names.is_library_package(package.name, package.files)
    }
    # A file that another package lists, too, is not NVIDIA's.
    ordered = sorted(installed, key=lambda package: package.metadata not in libraries_only)
    owners = {path: package for package in ordered for path in package.files}
    versions = {
        path: package.version
        for path, package in owners.items()
        # Outside of its folder, a package may list files of others.
        if package.metadata in libraries_only and path.startswith(f"{package.folder}/")
    }
    return owners, versions


def _list_files(
    tree: ImageTree[PlainFile], owners: Mapping[str, Package], of_nvidia: Container[str]
) -> Iterator[ExaminedFile]:
    """Yield the examined files, also those inside archives, each with the package that installed it.

    `of_nvidia` has the paths of the files that packages of NVIDIA's libraries installed.
    """
    for path, node in tree.list_files():
        if node.file is not None:
            for examined in _list_inner(path, node.layer, node.file):
                yield _add_package(examined, owners, of_nvidia)


def _list_inner(path: str, layer: str, file: File) -> Iterator[ExaminedFile]:
    nvidia = (
        "its name is that of a library of NVIDIA's"
        if nvidia_names.is_nvidia_library(path, file.soname)
        else None
    )
    yield ExaminedFile(path=path, layer=layer, file=file, nvidia=nvidia, name=path.rpartition(INNER)[2])
    # Files in an archive are not loaded from there, but an installation would put them into the image.
    for name, inner in file.inner:
        yield from _list_inner(f"{path}{INNER}{name}", layer, inner)


def _add_package(
    examined: ExaminedFile, owners: Mapping[str, Package], of_nvidia: Container[str]
) -> ExaminedFile:
    package = owners.get(examined.path)
    if package is None:
        return examined
    name = examined.path.removeprefix(f"{package.folder}/")
    rows = guarded_files.find_rows(package.name, package.version) if examined.file.recorded else ()
    is_listed = package.files[examined.path] == examined.file.recorded and any(
        row.path == name for row in rows
    )
    nvidia = examined.nvidia
    if examined.path in of_nvidia:
        nvidia = f"the package {package.name} installed it"
    return replace(examined, name=name, package=package.name, nvidia=nvidia, is_listed=is_listed)


def _counts(examined: ExaminedFile) -> bool:
    """Whether an image may use a file's device code."""
    return examined.is_own and _is_loadable(examined.file) and examined.role not in UNCOUNTED


def _list_units(coded_files: Iterable[ExaminedFile]) -> Iterator[Unit]:
    loose: dict[tuple[str, str], list[ExaminedFile]] = {}
    names = set()
    for examined in coded_files:
        names.add(examined.name)
        if _is_loose(examined):
            loose.setdefault((examined.package or "", examined.role), []).append(examined)
        else:
            yield Unit(
                path=examined.path,
                name=examined.name,
                code=examined.file.code.deciding_code,
                role=examined.role,
                guard=examined.guard,
            )
    for (_, role), cubins in loose.items():
        first, code = cubins[0], merge_device_code(examined.file.code for examined in cubins)
        members = {examined.name for examined in cubins}
        globs: list[str] = []
        if len(cubins) > 1:
            globs = device_code_entries.find_covering_globs([*members], names - members)
        yield Unit(
            path=first.path, name=first.name, code=code, role=role, files=len(cubins), globs=tuple(globs)
        )


def _make_entry(unit: Unit) -> Code:
    return device_code_entries.make_entry(
        unit.name,
        unit.code,
        files=unit.files,
        globs=unit.globs,
        optional=unit.role == OPTIONAL,
        guard=unit.guard,
    )


def _relax_alternatives(files: Sequence[ExaminedFile]) -> Iterator[ExaminedFile]:
    """Yield files; of those that are loaded only on some CPUs, no CPU flags are required."""
    flags = {
        examined.path: examined.file.host.required.union(examined.file.host.functions)
        for examined in files
        if examined.file.host
    }
    packages = {examined.path: examined.package for examined in files if examined.package}
    for_some_cpus = alternatives.find_cpu_alternatives(flags, packages)
    for examined in files:
        host = examined.file.host
        if host and examined.path in for_some_cpus:
            yield replace(examined, file=replace(examined.file, host=host.of_alternative, isa=None))
        else:
            yield examined


def _assign_roles(
    files: Iterable[ExaminedFile], listed: Iterable[Library], globs: Sequence[str]
) -> tuple[list[ExaminedFile], CodeRoles]:
    """Return the files with the roles of their device code, and what else was decided with the roles."""
    files = list(files)
    coded = [
        CodedFile(
            path=examined.path,
            name=examined.name,
            package=examined.package,
            toolkits=examined.file.code.toolkits,
            is_test=examined.is_test,
            is_listed=examined.is_listed,
        )
        for examined in files
        if examined.is_own and _is_loadable(examined.file) and examined.file.code.cuda
    ]
    roles = assign_roles(coded, libraries.list_runtimes(listed), globs)
    return [
        replace(examined, role=roles.by_path.get(examined.path, examined.role)) for examined in files
    ], roles


def _add_guards(
    files: Sequence[ExaminedFile], owners: Mapping[str, Package], tree: ImageTree[PlainFile]
) -> list[ExaminedFile]:
    """Return the files with their guards.

    A file may have one if its device code decides on which GPUs the image runs, unless its package asks
    first.
    """
    needed = {posixpath.basename(name) for examined in files for name in examined.file.needed}
    deciding = [
        PackagedCode(
            path=examined.path,
            package=owners.get(examined.path),
            code=examined.file.code.deciding_code,
            soname=examined.file.soname,
        )
        for examined in files
        if _counts(examined)
        and examined.file.code.cuda
        and examined.role == DECIDES
        and not _is_loose(examined)
    ]
    guards = find_source_guards(deciding, needed, tree)
    return [replace(examined, guard=guards.get(examined.path)) for examined in files]


def _is_loose(examined: ExaminedFile) -> bool:
    """Whether a file is one of a package's cubins, which are alternatives."""
    return examined.package is not None and examined.name.endswith(LOOSE)


def _is_loadable(file: File) -> bool:
    """Whether a driver can load the device code of a file; objects have to be linked first."""
    return file.linked and file.code.linked and bool(file.code.cubins or file.code.ptx or file.code.objects)


def _list_drivers(
    tree: ImageTree[PlainFile], files: Sequence[ExaminedFile], environment: Mapping[str, str]
) -> Iterator[DriverFile]:
    """Yield the libraries of the user-mode driver, and which of them programs load."""
    drivers = {examined.path: examined.file.driver for examined in files if examined.file.driver}
    for link, _ in tree.list_links():
        # Only the link's name, not its target's, shows that the file is a driver library.
        target = user_mode.parse_file_name(link)
        resolved = tree.find(link) if target and target[1] else None
        if target and resolved and resolved[0] not in drivers:
            drivers[link] = DriverLibrary(name=target[0], kind="exact", version=target[1])

    loader = Loader(tree, environment.get("LD_LIBRARY_PATH", ""))
    # Programs load these by dlopen, so that no file may need them.
    loaded = {file[0] for name in user_mode.LIBRARIES if (file := loader.find(f"{name}.so.1"))}
    for examined in files:
        folders = {"runpath": examined.file.runpath, "rpath": examined.file.rpath}
        for name in filter(user_mode.parse_file_name, examined.file.needed):
            if file := loader.find(name, **folders, origin=posixpath.dirname(examined.path)):
                loaded.add(file[0])
    for path, driver in sorted(drivers.items()):
        yield DriverFile(path=path, driver=driver, loaded=path in loaded)


def _list_stacks(
    installed: Sequence[Package], files: Sequence[ExaminedFile], tree: ImageTree[PlainFile]
) -> tuple[Stack, ...]:
    """Return the frameworks among the installed packages, sorted."""
    codes: dict[str, DeviceCode] = {
        examined.path: examined.file.code for examined in files if _is_loadable(examined.file)
    }
    stacks = []
    for package in installed:
        if STACKS.fullmatch(package.name):
            targets = {target for path in package.files for target in codes.get(path, NONE).cubins}
            stacks.append(
                Stack(
                    name=package.name,
                    version=package.version,
                    stated_version=get_version(package, tree),
                    cuda=get_stack_release(package, tree),
                    arch_list=tuple(sorted(f"sm_{target}" for target in targets)),
                )
            )
    return tuple(sorted(stacks, key=lambda framework: (framework.name, framework.version)))
