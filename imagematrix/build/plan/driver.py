"""A user-mode driver from a folder that the matrix names: its files, checked, and a copy for a build.

Distributions package few of NVIDIA's drivers. The files of any other driver are in its installer, and on
every node that has the driver. Those of cuda-compat are in its packages.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from imagematrix.audit.binaries import driver_file, elf
from imagematrix.audit.binaries.window import Window
from imagematrix.build.matrix.axis_values import COMPAT_DRIVER
from imagematrix.build.matrix.feasibility import ARCHES
from imagematrix.build.plan.context import FOLDER, LINK, TIME, Listing, copy_and_hash
from imagematrix.common.text import shorten_words
from imagematrix.errors import BuildError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from imagematrix.audit.binaries.driver_file import DriverLibrary
    from imagematrix.audit.binaries.elf import Elf
    from imagematrix.images.catalog.catalog import UserModeDriver

CONTEXT = "imagematrix-driver"  # the named build context with it
# The libraries that libcuda loads for compute programs, and NVML; as in NVIDIA's package cuda-compat 590.
REQUIRED = ("libcuda", "libnvidia-ml", "libnvidia-nvvm", "libnvidia-ptxjitcompiler")
OPTIONAL = ("libnvidia-gpucomp", "libnvidia-pkcs11", "libnvidia-pkcs11-openssl3", "libnvidia-tileiras")
UNVERSIONED = ("libnvidia-nvvm70.so.4",)  # the compiler for older GPUs, from 590 on
# cuda-compat has no NVML, and the compiler for linking only from CUDA 11.5 on.
COMPAT_REQUIRED = ("libcuda", "libnvidia-ptxjitcompiler")
COMPAT_OPTIONAL = ("libnvidia-nvvm", *OPTIONAL)
COMPAT_LIBCUDA = re.compile(r"libcuda\.so\.(\d{3}(?:\.\d{1,4}){1,2})", re.ASCII)
# The hook enable-cuda-compat of NVIDIA's runtime looks for one libcuda in the first of these folders, and
# adds the folder to a file in the second one if it is newer than the node's.
COMPAT_FOLDER = "usr/local/cuda/compat"
LOADER_FOLDER = "etc/ld.so.conf.d"
DRIVER_LIBRARY = re.compile(r"(libcuda|libnvidia-[a-z0-9-]+)\.so[.\d]*", re.ASCII)
MACHINES = {"x86_64": elf.X86_64, "aarch64": elf.AARCH64}
PACKAGE = ".deb"
SHOWN = 5  # files that a message names
LIBCUDA = "libcuda"
KINDS = {
    "exact": "from a driver without the note of cuda-compat",
    "compat": "from cuda-compat",
    "stub": "a stub to link with",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFolder:
    """The user-mode driver of `source`: its `files`, `links` and empty `folders` by their paths in an image.

    `listing` has the digests of all. `compat` is what the note in cuda-compat states, or None for the driver
    of a node.
    """

    source: Path | str
    files: Mapping[str, Path]
    links: Mapping[str, str]
    folders: tuple[str, ...] = ()
    listing: Listing
    compat: UserModeDriver | None = None

    @property
    def digest(self) -> str:
        """The digest of its files in an image."""
        return self.listing.digest


def expand_driver_source(name: str, version: str, platform: str) -> str:
    """Return `driver_from` or `compat_from`, with its placeholders filled in as NVIDIA does.

    On 64-bit Arm `{arch}` is aarch64 in the names of installers, and sbsa in those of archives. Names of
    packages have amd64 or arm64.
    """
    arch = ARCHES[platform]
    if name.endswith(PACKAGE):
        arch = platform.partition("/")[2]
    elif arch == "aarch64" and ".tar" in name:
        arch = "sbsa"
    return name.replace("{version}", version).replace("{arch}", arch)


def read_driver_folder(
    folder: Path, version: str, platform: str, source: Path | str | None = None
) -> DriverFolder:
    """Return the driver `version` for `platform` in `folder`, to which it was unpacked from `source`, if any.

    The version COMPAT_DRIVER stands for cuda-compat of any version. Raises UsageError if a file cannot be
    read, is missing, or belongs to another driver or platform.
    """
    try:
        return _collect_files(folder, version, ARCHES[platform], source or folder)
    except OSError as error:
        raise UsageError(f"{error.filename or folder}: {error.strerror}") from error


def copy_driver(driver: DriverFolder, parent: Path) -> Path:
    """Copy the driver, laid out for an image, to a new folder in a new folder of `parent`, and return it.

    The folder's name is the digest, because BuildKit caches sent files by the folder's name. Raises
    BuildError if the files differ from the listing.
    """
    name = driver.digest.removeprefix("sha256:")
    target = Path(tempfile.mkdtemp(dir=parent), name)
    try:
        copied = _copy_layout(driver.files, driver.links, driver.folders, target)
    except OSError as error:
        raise BuildError(f"{error.filename or target}: {error.strerror}") from error
    if copied.digest != driver.digest:
        raise BuildError(
            f"the files of {driver.source} changed after the plan was made: "
            + ", ".join(copied.find_changed_paths(driver.listing)),
            remedy="build again; images built so far are kept",
        )
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class _DriverContents:
    """What a driver consists of, and where an image has it.

    `libraries` are the names of the files that it has if they are present, `required` of those that it must
    have, and `place` is their folder in an image, which also has the empty `folders`. `origin` is where all
    of them are from.
    """

    name: str
    version: str
    arch: str
    place: str
    required: frozenset[str]
    libraries: tuple[str, ...]
    folders: tuple[str, ...] = ()
    is_compat: bool = False
    origin: str


def _list_driver_contents(version: str, arch: str) -> _DriverContents:
    return _DriverContents(
        name=f"the driver {version}",
        version=version,
        arch=arch,
        place=f"usr/lib/{arch}-linux-gnu",
        required=frozenset(f"{name}.so.{version}" for name in REQUIRED),
        libraries=(*[f"{name}.so.{version}" for name in (*REQUIRED, *OPTIONAL)], *UNVERSIONED),
        origin="name NVIDIA's installer instead, or copy the files from a node with this driver",
    )


def _list_compat_contents(versions: Sequence[str], arch: str, source: Path | str) -> _DriverContents:
    """Return what a cuda-compat with these versions of libcuda consists of; raise UsageError if not one."""
    origin = "name NVIDIA's package cuda-compat instead, or the folder `compat` in it"
    if not versions:
        raise UsageError(f"{source} has no libcuda.so.VERSION of cuda-compat", remedy=origin)
    if len(versions) > 1:  # then NVIDIA's runtime would take none of them
        shown = shorten_words(versions, SHOWN, more=", …")
        raise UsageError(f"{source} has several libcuda: {shown}", remedy="keep the files of one version")
    (version,) = versions
    return _DriverContents(
        name=f"cuda-compat {version}",
        version=version,
        arch=arch,
        place=COMPAT_FOLDER,
        required=frozenset(f"{name}.so.{version}" for name in COMPAT_REQUIRED),
        libraries=(*[f"{name}.so.{version}" for name in (*COMPAT_REQUIRED, *COMPAT_OPTIONAL)], *UNVERSIONED),
        folders=(LOADER_FOLDER,),
        is_compat=True,
        origin=origin,
    )


def _collect_files(folder: Path, version: str, arch: str, source: Path | str) -> DriverFolder:
    present = {path.name: path.resolve() for path in folder.iterdir() if path.is_file()}
    if version == COMPAT_DRIVER:
        versions = sorted({match[1] for match in map(COMPAT_LIBCUDA.fullmatch, present) if match})
        contents = _list_compat_contents(versions, arch, source)
    else:
        contents = _list_driver_contents(version, arch)
    queue = [name for name in contents.libraries if name in present]
    missing = set(contents.required - present.keys())
    files: dict[str, Path] = {}
    links: dict[str, str] = {}
    compat: UserModeDriver | None = None
    while queue:
        name = queue.pop()
        files[f"{contents.place}/{name}"] = present[name]
        headers, library = _check_library(present[name], name, source, contents)
        if library and library.name == LIBCUDA and contents.is_compat:
            compat = _describe_note(library, f"{source}/{name}")
        if headers.soname and headers.soname != name:
            links[f"{contents.place}/{headers.soname}"] = name
        for need in filter(DRIVER_LIBRARY.fullmatch, headers.needed):
            versioned = f"{need.partition('.so')[0]}.so.{contents.version}"
            file = versioned if versioned in present else need
            if file not in present:
                missing.add(versioned)
            elif f"{contents.place}/{file}" not in files and file not in queue:
                queue.append(file)
    if missing:
        lost = {name.partition(".so")[0] for name in missing}
        other_versions = sorted(name for name in present if name.partition(".so")[0] in lost)
        has = f"; it has {shorten_words(other_versions, SHOWN, more=', …')}" if other_versions else ""
        raise UsageError(
            f"{contents.name} in {source} is not complete: it lacks {', '.join(sorted(missing))}{has}",
            remedy=contents.origin,
        )
    listing = _copy_layout(files, links, contents.folders, None)
    return DriverFolder(
        source=source, files=files, links=links, folders=contents.folders, listing=listing, compat=compat
    )


def _check_library(
    path: Path, name: str, source: Path | str, contents: _DriverContents
) -> tuple[Elf, DriverLibrary | None]:
    """Return the headers of a library of `source`, and which one of the driver it is.

    Raises UsageError if its content contradicts its name, or belongs to another kind of driver.
    """
    path_text = f"{source}/{name}"
    with path.open("rb") as file:
        window = Window(file, 0, path.stat().st_size)
        headers = elf.read_elf(window)
        if headers is None or headers.damaged or headers.machine != MACHINES[contents.arch]:
            raise UsageError(f"{path_text} is not a library for {contents.arch}")
        match = DRIVER_LIBRARY.fullmatch(headers.soname or "")
        if match is None or match[1] != name.partition(".so")[0]:
            raise UsageError(f"{path_text} has the soname {headers.soname}")
        library = driver_file.identify_driver(name, headers, window)
    # Of cuda-compat, only libcuda has the note.
    kinds = ("compat",) if contents.is_compat and match[1] == LIBCUDA else ("exact",)
    if library and library.kind not in kinds:
        kind = KINDS[library.kind]
        raise UsageError(f"{path_text} is {kind}, not from {contents.name}")
    if library and library.version != contents.version:
        raise UsageError(f"{path_text} is from the driver {library.version}, not {contents.version}")
    return headers, library


def _describe_note(libcuda: DriverLibrary, path_text: str) -> UserModeDriver:
    """Return what the note of cuda-compat states; raise UsageError if it states no branches or brands."""
    compat = driver_file.describe_driver(libcuda)
    if not compat.branches or not compat.brands:
        lacks = "brands of GPUs" if compat.branches else "branches of kernel drivers"
        raise UsageError(
            f"{path_text} has a note that lists no {lacks}",
            remedy="packages for Tegra list none; take one for data-centre GPUs",
        )
    return compat


def _copy_layout(
    files: Mapping[str, Path], links: Mapping[str, str], empty: Sequence[str], target: Path | None
) -> Listing:
    """Return the listing of a driver, and copy it to the new folder `target`.

    It has files, links, and the `empty` folders.
    """
    folders = {str(parent) for name in files for parent in Path(name).parents} - {"."}
    folders |= {str(path) for name in empty for path in (Path(name), *Path(name).parents)} - {"."}
    if target:
        for name in sorted(["", *folders]):
            (target / name).mkdir()
            (target / name).chmod(0o755)
    entries = {}
    for name in sorted({*folders, *files, *links}):
        if name in folders:
            entries[name] = FOLDER, "-"
        elif name in files:
            entries[name] = copy_and_hash(files[name], target / name if target else None)
        else:
            entries[name] = LINK, hashlib.sha256(links[name].encode()).hexdigest()
            if target:
                (target / name).symlink_to(links[name])
    if target:
        for name in reversed(["", *entries]):  # adding entries changes a folder's time
            os.utime(target / name, (TIME, TIME), follow_symlinks=False)
    return Listing(entries)
