"""A user-mode driver from a folder that the matrix names: its files, checked, and a copy for a build.

Distributions package few of NVIDIA's drivers. The files of any other driver are in its installer, and on
every node that has the driver.
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
from imagematrix.build.matrix.feasibility import ARCHES
from imagematrix.build.plan.context import FOLDER, LINK, TIME, Listing, copy_and_hash
from imagematrix.common.text import shorten_words
from imagematrix.errors import BuildError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.audit.binaries.elf import Elf

CONTEXT = "imagematrix-driver"  # the named build context with it
# The libraries that libcuda loads for compute programs, and NVML; as in NVIDIA's package cuda-compat 590.
REQUIRED = ("libcuda", "libnvidia-ml", "libnvidia-nvvm", "libnvidia-ptxjitcompiler")
OPTIONAL = ("libnvidia-gpucomp", "libnvidia-pkcs11", "libnvidia-pkcs11-openssl3", "libnvidia-tileiras")
UNVERSIONED = ("libnvidia-nvvm70.so.4",)  # the compiler for older GPUs, from 590 on
DRIVER_LIBRARY = re.compile(r"(libcuda|libnvidia-[a-z0-9-]+)\.so[.\d]*", re.ASCII)
MACHINES = {"x86_64": elf.X86_64, "aarch64": elf.AARCH64}
SHOWN = 5  # files that a message names


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFolder:
    """The user-mode driver of `source`: its `files` and `links` by their paths in an image.

    `listing` has the digests of all.
    """

    source: Path | str
    files: Mapping[str, Path]
    links: Mapping[str, str]
    listing: Listing

    @property
    def digest(self) -> str:
        """The digest of its files in an image."""
        return self.listing.digest


def expand_driver_source(name: str, version: str, platform: str) -> str:
    """Return `driver_from` for a version and a platform, with its placeholders filled in as NVIDIA does.

    On 64-bit Arm `{arch}` is aarch64 in the names of installers, and sbsa in those of archives.
    """
    arch = ARCHES[platform]
    if arch == "aarch64" and ".tar" in name:
        arch = "sbsa"
    return name.replace("{version}", version).replace("{arch}", arch)


def read_driver_folder(
    folder: Path, version: str, platform: str, source: Path | str | None = None
) -> DriverFolder:
    """Return the driver `version` for `platform` in `folder`, to which it was unpacked from `source`, if any.

    Raises UsageError if a file cannot be read, is missing, or belongs to another driver or platform.
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
        copied = _copy_layout(driver.files, driver.links, target)
    except OSError as error:
        raise BuildError(f"{error.filename or target}: {error.strerror}") from error
    if copied.digest != driver.digest:
        raise BuildError(
            f"the files of {driver.source} changed after the plan was made: "
            + ", ".join(copied.find_changed_paths(driver.listing)),
            remedy="build again; images built so far are kept",
        )
    return target


def _collect_files(folder: Path, version: str, arch: str, source: Path | str) -> DriverFolder:
    present = {path.name: path.resolve() for path in folder.iterdir() if path.is_file()}
    names = [f"{name}.so.{version}" for name in (*REQUIRED, *OPTIONAL)] + list(UNVERSIONED)
    queue = [name for name in names if name in present]
    missing = {f"{name}.so.{version}" for name in REQUIRED} - present.keys()
    libraries = f"usr/lib/{arch}-linux-gnu"
    files: dict[str, Path] = {}
    links: dict[str, str] = {}
    while queue:
        name = queue.pop()
        files[f"{libraries}/{name}"] = present[name]
        headers = _check_library(present[name], name, source, version, arch)
        if headers.soname and headers.soname != name:
            links[f"{libraries}/{headers.soname}"] = name
        for need in filter(DRIVER_LIBRARY.fullmatch, headers.needed):
            versioned = f"{need.partition('.so')[0]}.so.{version}"
            file = versioned if versioned in present else need
            if file not in present:
                missing.add(versioned)
            elif f"{libraries}/{file}" not in files and file not in queue:
                queue.append(file)
    if missing:
        lost = {name.partition(".so")[0] for name in missing}
        other_versions = sorted(name for name in present if name.partition(".so")[0] in lost)
        has = f"; it has {shorten_words(other_versions, SHOWN, more=', …')}" if other_versions else ""
        raise UsageError(
            f"the driver {version} in {source} is not complete: it lacks {', '.join(sorted(missing))}{has}",
            remedy="name NVIDIA's installer instead, or copy the files from a node with this driver",
        )
    return DriverFolder(source=source, files=files, links=links, listing=_copy_layout(files, links, None))


def _check_library(path: Path, name: str, source: Path | str, version: str, arch: str) -> Elf:
    """Return the headers of a library of `source`; raise UsageError if they contradict its name."""
    path_text = f"{source}/{name}"
    with path.open("rb") as file:
        window = Window(file, 0, path.stat().st_size)
        headers = elf.read_elf(window)
        if headers is None or headers.damaged or headers.machine != MACHINES[arch]:
            raise UsageError(f"{path_text} is not a library for {arch}")
        match = DRIVER_LIBRARY.fullmatch(headers.soname or "")
        if match is None or match[1] != name.partition(".so")[0]:
            raise UsageError(f"{path_text} has the soname {headers.soname}")
        library = driver_file.identify_driver(name, headers, window)
    if library and library.kind != "exact":
        kind = "from cuda-compat" if library.kind == "compat" else "a stub to link with"
        raise UsageError(f"{path_text} is {kind}, not from the driver {version}")
    if library and library.version != version:
        raise UsageError(f"{path_text} is from the driver {library.version}, not {version}")
    return headers


def _copy_layout(files: Mapping[str, Path], links: Mapping[str, str], target: Path | None) -> Listing:
    """Return the listing of a driver's files and links, and copy them to the new folder `target`."""
    folders = {str(parent) for name in files for parent in Path(name).parents} - {"."}
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
