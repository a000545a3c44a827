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
from imagematrix.hardware.vendors import guarded_files, marches, user_mode
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import BYTES, SOURCE, TABLE
from imagematrix.images.oci.tree import ImageTree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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
class FoundFile:
    """An examined file with its path and its layer. `nvidia` says why it is NVIDIA's, or None.

    `package` is the Python package that installed it. `name` is its path in that package or in the archive
    that contains it, or else `path`. `role` says whether its device code counts; see `assign_roles`.
    `listed`: it is in the table of files that some GPUs do not use, see `hardware.vendors.guarded`. `guard`
    is the question that its package's sources ask before they use it.
    """

    path: str
    layer: str
    file: File
    nvidia: str | None
    name: str
    package: str | None = None
    role: str = DECIDES
    listed: bool = False
    guard: UseGuard | None = None

    @property
    def own(self) -> bool:
        """Whether it belongs to the image's programs, and is no file of NVIDIA's."""
        return self.nvidia is None

    @property
    def test(self) -> bool:
        """Whether it is test data of its package, by the folders in which it is."""
        return self.package is not None and not TEST_FOLDERS.isdisjoint(self.name.split("/")[:-1])

    @property
    def uncounted(self) -> str | None:
        """Why its device code for NVIDIA's GPUs counts for nothing; None if it counts, or if it has none."""
        if not self.file.code.cuda:
            return None
        return self.nvidia or (None if _loadable(self.file) else UNLINKED) or UNCOUNTED.get(self.role)


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

    `own` is the version that its files state, `version` that of its metadata.
    """

    name: str
    version: str
    own: str
    cuda: str | None
    arch_list: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The contents of an image, sorted by path.

    `cubins` and `ptx` hold for all files whose device code decides, `device_code` is exact; see `entries`.
    `release` is the CUDA release that is taken because of files for several; see `assign_roles`. `unmatched`
    are the globs of optional files that match none. `for_cuda` are the Python packages that are only for GPUs
    with CUDA: their metadata show it, or they bring libraries of NVIDIA's.
    """

    image: AuditedImage
    files: tuple[FoundFile, ...]
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
    def coded(self) -> Iterator[FoundFile]:
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
        return TABLE if any(found.listed and found.file.code.cuda for found in self.coded) else BYTES

    @property
    def toolkits(self) -> dict[str, str]:
        """The CUDA releases whose compilers made cubins in the image, each with the path of one file."""
        found: dict[str, str] = {}
        for examined in self.coded:
            found.update(dict.fromkeys(examined.file.code.toolkits - found.keys(), examined.path))
        return found

    @property
    def versions(self) -> tuple[tuple[str, str | None], ...]:
        """The frameworks and the libraries through which ranks talk, each with its version, sorted.

        The versions of several copies are joined by commas. It is None if that of a copy is unknown.
        """
        found: dict[str, set[str | None]] = {}
        frameworks = ((framework.name, framework.own) for framework in self.stacks)
        for name, own in (*libraries.list_communication_libraries(self.libraries), *frameworks):
            found.setdefault(name, set()).add(own if own and STATED.fullmatch(own) else None)
        return tuple(sorted((name, _joined(each)) for name, each in found.items()))

    @property
    def programs(self) -> Iterator[FoundFile]:
        """The image's own files with CPU code: those that no package of the distribution installed."""
        return (
            found for found in self.files if found.own and _program(found.file) and INNER not in found.path
        )

    @property
    def decided(self) -> bool:
        """Whether the CPU requirements of all programs are known."""
        return all(
            found.file.host is not None
            and found.file.host.whole
            and not (found.file.host.undecided or found.file.damaged)
            for found in self.programs
        )

    @property
    def contained(self) -> frozenset[str]:
        """The CPU flags of all instructions in programs, required or not."""
        return frozenset(
            flag for found in self.programs if found.file.host for flag in found.file.host.functions
        )

    @property
    def flags(self) -> dict[str, str]:
        """The CPU flags that notes or instructions prove to be required, each with the path of one file."""
        levels = dict(marches.LEVELS)
        proof = self._paths(lambda host: host.required)
        for level, path in self.isa:
            reached = marches.get_level_rank(level)
            for name, added in levels.items():
                if marches.get_level_rank(name) <= reached:
                    proof.update(dict.fromkeys(added - proof.keys(), path))
        return proof

    @property
    def probable_flags(self) -> dict[str, str]:
        """The CPU flags that are probably required, without those that are proven; see HostCode."""
        return _without(self._paths(lambda host: host.probable), self.flags)

    @property
    def partial_flags(self) -> dict[str, str]:
        """The CPU flags that the larger part of a file needs, without those that are required or probable."""
        known = self.flags | self._paths(lambda host: host.probable)
        return _without(self._paths(lambda host: host.partial), known)

    def _paths(self, flags_of: Callable[[HostCode], frozenset[str]]) -> dict[str, str]:
        """Return the CPU flags that `flags_of` returns for programs, each with the path of one file."""
        paths: dict[str, str] = {}
        for found in self.programs:
            if found.file.host:
                paths.update(dict.fromkeys(flags_of(found.file.host) - paths.keys(), found.path))
        return paths


def requires_level(file: File) -> bool:
    """Whether a file's notes require more than the first CPU level, which every CPU has."""
    return file.isa not in (None, BASELINE)


def audit_image(image: AuditedImage, optional: Sequence[str] = ()) -> Audit:
    """Return the audit of an image, from the files that its containers would see; raise AuditError.

    `optional` are globs of files with device code that some GPUs do not use, besides those in the labels.
    """
    tree = ImageTree(image.layers)
    installed, damaged = list_packages(tree)
    # A file that another package lists, too, is not NVIDIA's.
    ordered = sorted(installed, key=lambda package: not nvidia_names.is_distributed(package.name))
    owners = {path: package for package in ordered for path in package.files}
    versions = {path: package.version for path, package in owners.items() if _of_nvidia(path, package)}
    files = sorted((_named(found, owners) for found in _found(tree)), key=lambda found: found.path)
    listed = tuple(
        library for found in files for library in libraries.list_libraries(found.path, found.file, versions)
    )
    files = [*_without_alternatives(files)]
    own = _roles(files, listed, tuple(dict.fromkeys((*optional, *labels.read_optional(image.labels)))))
    files = [
        replace(found, role=own.by_path[found.path]) if found.path in own.by_path else found
        for found in files
    ]
    needed = {posixpath.basename(name) for found in files for name in found.file.needed}
    guards = find_source_guards(
        [_packaged(found, owners) for found in files if _may_be_guarded(found)], needed, tree
    )
    files = [replace(found, guard=guards.get(found.path)) for found in files]
    used = [*filter(_counts, files)]
    units = tuple(_units(found for found in used if found.file.code.cuda))
    deciding = [unit for unit in units if unit.role == DECIDES]
    codes = [unit.code for unit in deciding]
    drivers = tuple(_drivers(tree, files, image.environment))
    return Audit(
        image=image,
        files=tuple(files),
        units=units,
        contents=list_contents(tree, installed, _unpackaged(listed, drivers), damaged),
        drivers=drivers,
        libraries=listed,
        stacks=tuple(
            sorted(_stacks(installed, files, tree), key=lambda framework: (framework.name, framework.version))
        ),
        cubins=tuple(device_code_entries.find_common_cubins(codes, [unit.guard for unit in deciding])),
        ptx=tuple(device_code_entries.find_common_ptx(codes)),
        device_code=device_code_entries.join_entries(
            device_code_entries.make_entry(
                unit.name,
                unit.code,
                files=unit.files,
                globs=unit.globs,
                optional=unit.role == OPTIONAL,
                guard=unit.guard,
            )
            for unit in units
        ),
        release=own.release,
        unmatched=own.unmatched,
        for_cuda=frozenset(
            [package.name for package in installed if package.for_cuda]
            + [found.package for found in files if found.package and not found.own]
        ),
        compressed=any(found.file.code.compressed for found in used),
        objects=tuple(sorted({target for found in used for target in found.file.code.objects})),
        # The loader takes files in glibc-hwcaps folders only on CPUs that can run them.
        isa=tuple(
            (found.file.isa, found.path)
            for found in files
            if found.file.isa and requires_level(found.file) and HWCAPS not in found.path.split("/")
        ),
    )


def _joined(versions: Iterable[str | None]) -> str | None:
    known = [version for version in versions if version]
    return ",".join(sorted(known)) if len(known) == len([*versions]) else None


def _found(tree: ImageTree[PlainFile]) -> Iterator[FoundFile]:
    for path, node in tree.list_files():
        if node.file is not None:
            yield from _with_inner(path, node.layer, node.file)


def _with_inner(path: str, layer: str, file: File) -> Iterator[FoundFile]:
    nvidia = (
        "its name is that of a library of NVIDIA's"
        if nvidia_names.is_nvidia_library(path, file.soname)
        else None
    )
    yield FoundFile(path=path, layer=layer, file=file, nvidia=nvidia, name=path.rpartition(INNER)[2])
    # Files in an archive are not loaded from there, but an installation would put them into the image.
    for name, inner in file.inner:
        yield from _with_inner(f"{path}{INNER}{name}", layer, inner)


def _named(found: FoundFile, owners: Mapping[str, Package]) -> FoundFile:
    package = owners.get(found.path)
    if package is None:
        return found
    name = found.path.removeprefix(f"{package.folder}/")
    rows = guarded_files.find_rows(package.name, package.version) if found.file.recorded else ()
    known = package.files[found.path] == found.file.recorded and any(row.path == name for row in rows)
    nvidia = f"the package {package.name} installed it" if _of_nvidia(found.path, package) else found.nvidia
    return replace(found, name=name, package=package.name, nvidia=nvidia, listed=known)


def _of_nvidia(path: str, package: Package) -> bool:
    """Whether a file that a package lists is NVIDIA's. Outside its folder, it may list files of others."""
    return nvidia_names.is_distributed(package.name) and path.startswith(f"{package.folder}/")


def _counts(found: FoundFile) -> bool:
    """Whether an image may use a file's device code."""
    return found.own and _loadable(found.file) and found.role not in UNCOUNTED


def _units(coded: Iterable[FoundFile]) -> Iterator[Unit]:
    loose: dict[tuple[str, str], list[FoundFile]] = {}
    names = set()
    for found in coded:
        names.add(found.name)
        if _is_loose(found):
            loose.setdefault((found.package or "", found.role), []).append(found)
        else:
            yield Unit(
                path=found.path,
                name=found.name,
                code=found.file.code.deciding,
                role=found.role,
                guard=found.guard,
            )
    for (_, role), cubins in loose.items():
        first, code = cubins[0], merge_device_code(found.file.code for found in cubins)
        own = {found.name for found in cubins}
        globs = tuple(device_code_entries.find_covering_globs([*own], names - own)) if len(cubins) > 1 else ()
        yield Unit(path=first.path, name=first.name, code=code, role=role, files=len(cubins), globs=globs)


def _without(flags: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    return {flag: path for flag, path in flags.items() if flag not in others}


def _without_alternatives(files: Iterable[FoundFile]) -> Iterator[FoundFile]:
    """Yield files; of those that are loaded only on some CPUs, no CPU flags are required."""
    listed = list(files)
    flags = {
        found.path: found.file.host.required.union(found.file.host.functions)
        for found in listed
        if found.file.host
    }
    packages = {found.path: found.package for found in listed if found.package}
    some = alternatives.find_cpu_alternatives(flags, packages)
    for found in listed:
        host = found.file.host
        if host and found.path in some:
            yield replace(found, file=replace(found.file, host=host.of_alternative, isa=None))
        else:
            yield found


def _roles(files: Iterable[FoundFile], listed: Iterable[Library], optional: Sequence[str]) -> CodeRoles:
    coded = [
        CodedFile(
            path=found.path,
            name=found.name,
            package=found.package,
            toolkits=found.file.code.toolkits,
            test=found.test,
            listed=found.listed,
        )
        for found in files
        if found.own and _loadable(found.file) and found.file.code.cuda
    ]
    return assign_roles(coded, libraries.list_runtimes(listed), optional)


def _may_be_guarded(found: FoundFile) -> bool:
    """Whether a file's device code decides on which GPUs the image runs, unless its package asks first."""
    return _counts(found) and found.file.code.cuda and found.role == DECIDES and not _is_loose(found)


def _is_loose(found: FoundFile) -> bool:
    """Whether a file is one of a package's cubins, which are alternatives."""
    return found.package is not None and found.name.endswith(LOOSE)


def _packaged(found: FoundFile, owners: Mapping[str, Package]) -> PackagedCode:
    return PackagedCode(
        path=found.path,
        package=owners.get(found.path),
        code=found.file.code.deciding,
        soname=found.file.soname,
    )


def _loadable(file: File) -> bool:
    """Whether a driver can load the device code of a file; objects have to be linked first."""
    return file.linked and file.code.linked and bool(file.code.cubins or file.code.ptx or file.code.objects)


def _program(file: File) -> bool:
    return file.linked and not file.packaged and file.machine not in (None, elf.CUDA)


def _drivers(
    tree: ImageTree[PlainFile], listed: Sequence[FoundFile], environment: Mapping[str, str]
) -> Iterator[DriverFile]:
    files = {found.path: found.file.driver for found in listed if found.file.driver}
    for link, _ in tree.list_links():
        # Only the link's name, not its target's, shows that the file is a driver library.
        target = user_mode.parse_file_name(link)
        resolved = tree.find(link) if target and target[1] else None
        if target and resolved and resolved[0] not in files:
            files[link] = DriverLibrary(name=target[0], kind="exact", version=target[1])
    loader = Loader(tree, environment.get("LD_LIBRARY_PATH", ""))
    # Programs load these by dlopen, so that no file may need them.
    loaded = {file[0] for name in user_mode.LIBRARIES if (file := loader.find(f"{name}.so.1"))}
    for found in listed:
        own = {"runpath": found.file.runpath, "rpath": found.file.rpath}
        for name in filter(user_mode.parse_file_name, found.file.needed):
            if file := loader.find(name, **own, origin=posixpath.dirname(found.path)):
                loaded.add(file[0])
    for path, driver in sorted(files.items()):
        yield DriverFile(path=path, driver=driver, loaded=path in loaded)


def _unpackaged(
    listed: Iterable[Library], drivers: Iterable[DriverFile]
) -> Iterator[tuple[str, str | None, str]]:
    """Yield name, version and path of NVIDIA's shared libraries and of the parts of its driver."""
    for library in listed:
        if library.nvidia and not library.static:
            yield library.name, library.version, library.path
    for found in drivers:
        yield found.driver.name, found.driver.version, found.path


def _stacks(
    installed: Sequence[Package], files: Sequence[FoundFile], tree: ImageTree[PlainFile]
) -> Iterator[Stack]:
    codes: dict[str, DeviceCode] = {found.path: found.file.code for found in files if _loadable(found.file)}
    for package in installed:
        if STACKS.fullmatch(package.name):
            own = {target for path in package.files for target in codes.get(path, NONE).cubins}
            yield Stack(
                name=package.name,
                version=package.version,
                own=get_version(package, tree),
                cuda=get_stack_release(package, tree),
                arch_list=tuple(sorted(f"sm_{target}" for target in own)),
            )
