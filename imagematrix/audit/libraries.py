"""NVIDIA's libraries in an image: their names, their versions, and the oldest driver that they need."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

from imagematrix.audit import driver_file
from imagematrix.facts import cuda

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from imagematrix.audit.objects import File

__all__ = ["Library", "libraries", "of_nvidia"]

# Parts of a file name: lib, the library's name, and the version after .so or .a. auditwheel adds a hash to
# the names of the libraries that it copies into a wheel.
FILE = re.compile(
    r"lib([A-Za-z0-9_-]+?)(?:-[0-9a-f]{8})?(?:\.alt)?(_static(?:_nocallback)?)?\.(?:so|a)((?:\.\d+)*)",
    re.ASCII,
)
NAMES = re.compile(
    r"cudart|cudadevrt|cublas|cublasLt|nvblas|cufftw?|curand|cusolver(?:Mg)?|cusparse(?:Lt)?|cudnn(?:_\w+)?"
    r"|cutensor(?:Mg|Net)?|cupti|cufile(?:_rdma)?|cudss(?:_\w+)?|nccl|nccl-net|nvrtc(?:-builtins)?|nvJitLink"
    r"|nvjpeg(?:2k)?|nvfatbin|nvinfer(?:_\w+)?|nvonnxparser|nvshmem\w*|nvToolsExt|nvcomp\w*|npp\w+|nvptxcompiler"
    r"|culibos|cudla|nvtiff|checkpoint|cudla",
    re.ASCII,
)
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


def of_nvidia(path: str, soname: str | None) -> bool:
    """Whether a file's names are those of a library of NVIDIA's. Its device code counts for no promise."""
    return _named(path, soname) is not None or any(map(driver_file.named, (path, soname or "")))


def libraries(path: str, file: File, packages: Mapping[str, str]) -> Iterator[Library]:
    """Yield NVIDIA's libraries in a file: the file itself, or CUDA's runtime linked into it.

    `packages` are the versions of Python packages by the paths of the files that they installed.
    """
    if file.static_cudart:
        yield Library(name="cudart", path=path, version=None, static=True)
    parts = _named(path, file.soname)
    if parts is None:
        return
    name, suffix, static = parts
    full = suffix if suffix.count(".") > 1 else None
    version = file.version or full or packages.get(path) or suffix or None
    yield Library(
        name=name,
        path=path,
        version=version,
        static=static,
        oldest_driver=_oldest(version) if version and name in RELEASED else None,
    )


def _named(path: str, soname: str | None) -> tuple[str, str, bool] | None:
    """Return a library's name, the version in its file name, and whether it is static; None if it is none."""
    for name in (posixpath.basename(path), soname or ""):
        match = FILE.fullmatch(name)
        if match and NAMES.fullmatch(match[1]):
            return match[1], match[3].lstrip("."), name.endswith(".a")
    return None


def _oldest(version: str) -> str | None:
    """Return the oldest driver for programs built with the CUDA release of a library's version."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    names = (f"{major}.{minor}", f"{major}.0")
    return next(
        (driver for name in names if cuda.release(name) and (driver := cuda.lowest_driver(name))), None
    )
