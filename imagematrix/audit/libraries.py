"""NVIDIA's libraries in an image: their names, their versions, and the oldest driver that they need."""

from __future__ import annotations

import re
from dataclasses import dataclass

from imagematrix.audit import nvidia_names
from imagematrix.facts import cuda, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from imagematrix.audit.objects import File

__all__ = ["RUNTIME", "Library", "libraries", "runtimes"]

RUNTIME = "cudart"

# Libraries with the version of a CUDA release, or at least with its major version.
RELEASED = frozenset({"cudart", "nvrtc", "nvrtc-builtins", "nvJitLink", "cublas", "cublasLt", "cupti"})
VERSION = re.compile(r"\d+(?:\.\d+)+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library of NVIDIA's toolkits. Unknown values are None; `static`: it is linked into a program."""

    name: str
    path: str
    version: str | None
    static: bool = False
    oldest_driver: str | None = None


def libraries(path: str, file: File, packages: Mapping[str, str]) -> Iterator[Library]:
    """Yield NVIDIA's libraries in a file: the file itself, or CUDA's runtime linked into it.

    `packages` are the versions of Python packages by the paths of the files that they installed.
    """
    if file.static_cudart:
        yield Library(name="cudart", path=path, version=None, static=True)
    parts = nvidia_names.named(path, file.soname)
    if parts is None:
        return
    name, suffix, static = parts
    # Names such as libcublas.so.12 state only the major version, of which a package knows more.
    full = suffix if suffix.count(".") > 1 else None
    version = file.version or full or packages.get(path) or suffix or None
    yield Library(
        name=name,
        path=path,
        version=version,
        static=static,
        oldest_driver=_oldest(version) if version and name in RELEASED else None,
    )


def runtimes(listed: Iterable[Library]) -> list[str]:
    """Return the releases of CUDA's runtime among libraries, X.0 if only the major release X is known."""
    releases = []
    for library in listed:
        if library.name == RUNTIME and library.version:
            major, _, rest = library.version.partition(".")
            releases.append(f"{major}.{rest.partition('.')[0] or 0}")
    return [release for release in releases if versions.RELEASE.fullmatch(release)]


def _oldest(version: str) -> str | None:
    """Return the oldest driver for programs built with the CUDA release of a library's version."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    names = (f"{major}.{minor}", f"{major}.0")
    return next(
        (driver for name in names if cuda.release(name) and (driver := cuda.lowest_driver(name))), None
    )
