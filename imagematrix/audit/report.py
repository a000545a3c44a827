"""The Audit of an image: everything that its bytes prove, for the document and for catalog entries."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from imagematrix.audit import libraries, promise
from imagematrix.audit.device_code import NONE
from imagematrix.audit.driver_file import LIBRARIES, Driver, named
from imagematrix.audit.fatbin import EM_CUDA
from imagematrix.audit.loader import Loader
from imagematrix.audit.python_packages import STACKS, packages, stack
from imagematrix.audit.tree import Tree
from imagematrix.facts import marches

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from imagematrix.audit.device_code import DeviceCode
    from imagematrix.audit.image import Image
    from imagematrix.audit.libraries import Library
    from imagematrix.audit.objects import File
    from imagematrix.audit.python_packages import Package

__all__ = ["Audit", "DriverFile", "Found", "Stack", "audit", "needs_level"]

BASELINE = "x86-64-v1"
HWCAPS = "glibc-hwcaps"
INNER = "!/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An examined file with its path and its layer. `own`: it is no library of NVIDIA's."""

    path: str
    layer: str
    file: File
    own: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFile:
    """A library of the user-mode driver at a path. `loaded`: the loader takes this file for the library."""

    path: str
    driver: Driver
    loaded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A framework: the facts that its package states, and the targets of the cubins in its files."""

    name: str
    version: str
    cuda: str | None
    arch_list: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The contents of an image, sorted by path.

    `cubins` and `ptx` hold for all files with device code except NVIDIA's libraries; see `promise`.
    """

    image: Image
    files: tuple[Found, ...]
    drivers: tuple[DriverFile, ...]
    libraries: tuple[Library, ...]
    stacks: tuple[Stack, ...]
    cubins: tuple[str, ...]
    ptx: tuple[tuple[str, str], ...]
    compressed: bool
    objects: tuple[str, ...]
    isa: tuple[tuple[str, str], ...]

    @property
    def coded(self) -> Iterator[Found]:
        """The files whose device code decides which targets the image covers."""
        return (one for one in self.files if one.own and _loadable(one.file))

    @property
    def programs(self) -> Iterator[Found]:
        """The image's own files with CPU code: those that no package of the distribution installed."""
        return (one for one in self.files if one.own and _program(one.file) and INNER not in one.path)

    @property
    def decided(self) -> bool:
        """Whether the CPU requirements of all programs are known."""
        return all(
            one.file.host is not None
            and one.file.host.whole
            and not (one.file.host.undecided or one.file.damaged)
            for one in self.programs
        )

    @property
    def contained(self) -> frozenset[str]:
        """The CPU flags of all instructions in programs, required or not."""
        return frozenset(flag for one in self.programs if one.file.host for flag in one.file.host.functions)

    @property
    def flags(self) -> dict[str, str]:
        """The CPU flags that notes or instructions prove to be required, each with the path of one file."""
        levels = dict(marches.LEVELS)
        proof: dict[str, str] = {}
        for one in self.programs:
            if one.file.host:
                proof.update(dict.fromkeys(one.file.host.required - proof.keys(), one.path))
        for level, path in self.isa:
            reached = marches.level_rank(level)
            for name, added in levels.items():
                if marches.level_rank(name) <= reached:
                    proof.update(dict.fromkeys(added - proof.keys(), path))
        return proof


def needs_level(file: File) -> bool:
    """Whether a file's notes require more than the first CPU level, which every CPU has."""
    return file.isa not in (None, BASELINE)


def audit(image: Image) -> Audit:
    """Return the audit of an image, from the files that its containers would see; raise AuditError."""
    tree = Tree(image.layers)
    installed = list(packages(tree))
    versions = {path: package.version for package in installed for path in package.files}
    files = sorted(_found(tree), key=lambda one: one.path)
    codes = [one.file.code for one in files if one.own and _loadable(one.file)]
    return Audit(
        image=image,
        files=tuple(files),
        drivers=tuple(_drivers(tree, files, image.environment)),
        libraries=tuple(
            library for one in files for library in libraries.libraries(one.path, one.file, versions)
        ),
        stacks=tuple(sorted(_stacks(installed, files, tree), key=lambda one: (one.name, one.version))),
        cubins=tuple(promise.cubins([code for code in codes if code.cuda])),
        ptx=tuple(promise.ptx([code for code in codes if code.cuda])),
        compressed=any(code.compressed for code in codes),
        objects=tuple(sorted({target for code in codes for target in code.objects})),
        # The loader takes files in glibc-hwcaps folders only on CPUs that can run them.
        isa=tuple(
            (one.file.isa, one.path)
            for one in files
            if one.file.isa and needs_level(one.file) and HWCAPS not in one.path.split("/")
        ),
    )


def _found(tree: Tree) -> Iterator[Found]:
    for path, node in tree.files():
        if node.file is not None:
            yield from _with_inner(path, node.layer, node.file)


def _with_inner(path: str, layer: str, file: File) -> Iterator[Found]:
    yield Found(path=path, layer=layer, file=file, own=not libraries.of_nvidia(path, file.soname))
    # Files in an archive are not loaded from there, but an installation would put them into the image.
    for name, inner in file.inner:
        yield from _with_inner(f"{path}{INNER}{name}", layer, inner)


def _loadable(file: File) -> bool:
    """Whether a driver can load the device code of a file; objects have to be linked first."""
    return file.linked and file.code.linked and bool(file.code.cubins or file.code.ptx or file.code.objects)


def _program(file: File) -> bool:
    return file.linked and not file.packaged and file.machine not in (None, EM_CUDA)


def _drivers(tree: Tree, listed: Sequence[Found], environment: Mapping[str, str]) -> Iterator[DriverFile]:
    files = {one.path: one.file.driver for one in listed if one.file.driver}
    for link in tree.links():
        # Only the link's name, not its target's, shows that the file is a driver library.
        target = named(link)
        resolved = tree.find(link) if target and target[1] else None
        if target and resolved and resolved[0] not in files:
            files[link] = Driver(name=target[0], kind="exact", version=target[1])
    loader = Loader(tree, environment.get("LD_LIBRARY_PATH", ""))
    loaded = {file[0] for name in LIBRARIES if (file := loader.find(f"{name}.so.1"))}
    for one in listed:
        own = {"runpath": one.file.runpath, "rpath": one.file.rpath}
        for name in filter(named, one.file.needed):
            if file := loader.find(name, **own, origin=posixpath.dirname(one.path)):
                loaded.add(file[0])
    for path, driver in sorted(files.items()):
        yield DriverFile(path=path, driver=driver, loaded=path in loaded)


def _stacks(installed: Sequence[Package], files: Sequence[Found], tree: Tree) -> Iterator[Stack]:
    codes: dict[str, DeviceCode] = {one.path: one.file.code for one in files if _loadable(one.file)}
    for package in installed:
        if STACKS.fullmatch(package.name):
            own = {target for path in package.files for target in codes.get(path, NONE).cubins}
            yield Stack(
                name=package.name,
                version=package.version,
                cuda=stack(package, tree),
                arch_list=tuple(sorted(f"sm_{target}" for target in own)),
            )
