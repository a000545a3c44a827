"""NVIDIA's libraries in an image: which there are, of which versions, and the oldest driver they imply."""

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

# By the name of the file: lib, the name, and what comes behind .so or .a. auditwheel adds a hash to the names
# of libraries that it puts into a wheel.
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
# Those whose version is that of a CUDA release, or at least has its major.
RELEASED = frozenset({"cudart", "nvrtc", "nvrtc-builtins", "nvJitLink", "cublas", "cublasLt", "cupti"})
VERSION = re.compile(r"\d+(?:\.\d+)+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library of NVIDIA's toolkits. What is not known is None; `static` says whether it is in a program."""

    name: str
    path: str
    version: str | None
    static: bool = False
    oldest_driver: str | None = None


def of_nvidia(path: str, soname: str | None) -> bool:
    """Whether a file is a library of NVIDIA's by its names, which carries what device code it carries."""
    return _named(path, soname) is not None or any(map(driver_file.named, (path, soname or "")))


def libraries(path: str, file: File, packages: Mapping[str, str]) -> Iterator[Library]:
    """Yield the libraries of NVIDIA's that a file is, or has in it.

    `packages` are the versions of the Python packages that installed files, by their paths.
    """
    if file.static_cudart:
        yield Library(name="cudart", path=path, version=None, static=True)
    parts = _named(path, file.soname)
    if parts is None:
        return
    name, behind, static = parts
    full = behind if behind.count(".") > 1 else None
    version = file.version or full or packages.get(path) or behind or None
    yield Library(
        name=name,
        path=path,
        version=version,
        static=static,
        oldest_driver=_oldest(version) if version and name in RELEASED else None,
    )


def _named(path: str, soname: str | None) -> tuple[str, str, bool] | None:
    """Return a library's name, the version behind it, and whether it is static; None of other files."""
    for name in (posixpath.basename(path), soname or ""):
        match = FILE.fullmatch(name)
        if match and NAMES.fullmatch(match[1]):
            return match[1], match[3].lstrip("."), name.endswith(".a")
    return None


def _oldest(version: str) -> str | None:
    """Return the oldest driver that runs what was built with the CUDA release of a version."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    names = (f"{major}.{minor}", f"{major}.0")
    return next(
        (driver for name in names if cuda.release(name) and (driver := cuda.lowest_driver(name))), None
    )
