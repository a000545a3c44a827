"""The libraries in an image that a driver or the ranks of a job depend on, with their versions.

They are NVIDIA's, each with the oldest driver that it needs, and those through which ranks talk.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from imagematrix.audit.binaries import library_versions, nvidia_names
from imagematrix.hardware.vendors import cuda, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from imagematrix.audit.binaries.objects import File

RUNTIME = "cudart"

# Libraries with the version of a CUDA release, or at least with its major version.
RELEASED = frozenset({"cudart", "nvrtc", "nvrtc-builtins", "nvJitLink", "cublas", "cublasLt", "cupti"})
VERSION = re.compile(r"\d+(?:\.\d+)+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library. Unknown values are None; `static`: it is linked into a program.

    `nvidia`: it is one of NVIDIA's toolkits. `stated`: the version is what the bytes of the library state.
    """

    name: str
    path: str
    version: str | None
    static: bool = False
    oldest_driver: str | None = None
    nvidia: bool = True
    stated: bool = False


def list_libraries(path: str, file: File, packages: Mapping[str, str]) -> Iterator[Library]:
    """Yield the libraries in a file: the file itself, or CUDA's runtime or NCCL linked into it.

    `packages` are the versions of Python packages by the paths of the files that they installed.
    """
    if file.static_cudart:
        yield Library(name="cudart", path=path, version=None, static=True)
    parts = nvidia_names.parse_library_name(path, file.soname)
    stated_name, stated_version = file.stated or (None, None)
    if stated_name and (parts is None or parts[0] != stated_name):
        nvidia = stated_name == library_versions.LINKED
        yield Library(
            name=stated_name,
            path=path,
            version=stated_version,
            static=nvidia,
            nvidia=nvidia,
            stated=stated_version is not None,
        )
    if parts is None:
        return
    name, suffix, static = parts
    # Names such as libcublas.so.12 state only the major version, of which a package knows more.
    full = suffix if suffix.count(".") > 1 else None
    stated = stated_version if stated_name == name else None
    version = stated or full or packages.get(path) or suffix or None
    yield Library(
        name=name,
        path=path,
        version=version,
        static=static,
        oldest_driver=_find_oldest_driver(version) if version and name in RELEASED else None,
        stated=stated is not None,
    )


def list_runtimes(listed: Iterable[Library]) -> list[str]:
    """Return the releases of CUDA's runtime among libraries, X.0 if only the major release X is known."""
    releases = []
    for library in listed:
        if library.name == RUNTIME and library.version:
            major, _, rest = library.version.partition(".")
            releases.append(f"{major}.{rest.partition('.')[0] or 0}")
    return [release for release in releases if versions.RELEASE.fullmatch(release)]


def list_communication_libraries(listed: Iterable[Library]) -> Iterator[tuple[str, str | None]]:
    """Yield name and version of each library that a program may load for its ranks to talk through.

    The version is what its bytes state, None if they state none.
    """
    for library in listed:
        # Archives are for linking, and are not loaded themselves.
        if (
            library.name in library_versions.NAMES
            and "!/" not in library.path
            and not library.path.endswith(".a")
        ):
            yield library.name, library.version if library.stated else None


def _find_oldest_driver(version: str) -> str | None:
    """Return the oldest driver for programs built with the CUDA release of a library's version."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    names = (f"{major}.{minor}", f"{major}.0")
    return next(
        (driver for name in names if cuda.get_release(name) and (driver := cuda.get_lowest_driver(name))),
        None,
    )
