"""The names of NVIDIA's libraries, of toolkits and of the user-mode driver, and of its Python packages."""

from __future__ import annotations

import posixpath
import re

from imagematrix.hardware.vendors import user_mode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# Parts of a file name: lib, the library's name, and the version after .so or .a. auditwheel adds a hash to
# the names of the libraries that it copies into a wheel.
FILE = re.compile(
    r"lib([A-Za-z0-9_-]+?)(?:-[0-9a-f]{8})?(?:\.alt)?(_static(?:_nocallback)?)?\.(?:so|a)((?:\.\d+)*)",
    re.ASCII,
)
NAMES = re.compile(
    r"cudart|cudadevrt|cublas|cublasLt|nvblas|cufftw?|curand|cusolver(?:Mg)?|cu(?:blas|fft|solver)[Mm]p"
    r"|cusparse(?:Lt)?|cudnn(?:_\w+)?|cutensor(?:M[gp]|net)?|custatevec|cudensitymat|cupauliprop|custabilizer"
    r"|cupti|nvperf_(?:host|target)|pcsamplingutil|cufile(?:_rdma)?|cudss(?:_\w+)?|nccl|nccl-net"
    r"|nvrtc(?:-builtins)?|nvJitLink"
    r"|nvjpeg(?:2k)?|nvfatbin|nvinfer(?:_\w+)?|nvonnxparser|nvshmem\w*|nvToolsExt|nvcomp\w*|npp\w+|nvptxcompiler"
    r"|culibos|nvtiff|checkpoint|cudla",
    re.ASCII,
)
# The Python packages by which NVIDIA distributes its libraries. Authors in metadata prove nothing.
PACKAGES = re.compile(
    r"nvidia-.+|tensorrt(?:-(?:lean|dispatch))?(?:-cu\d+)?(?:-(?:bindings|libs))?", re.ASCII | re.DOTALL
)
# Further libraries of the user-mode driver.
OF_DRIVER = re.compile(r"lib(?:nvidia-[a-z0-9-]+|nvcuvid|nvoptix|cudadebugger)\.so(?:\.\d+)*", re.ASCII)


def is_library_package(package: str, files: Iterable[str]) -> bool:
    """Whether NVIDIA distributes libraries, and nothing else, by a Python package of this normalised name.

    One that has modules of Python besides those that make its folders packages is a program of its own, as
    nvidia-dali is: its device code decides.
    """
    return PACKAGES.fullmatch(package) is not None and all(
        posixpath.basename(path) == "__init__.py" for path in files if path.endswith(".py")
    )


def is_nvidia_library(path: str, soname: str | None) -> bool:
    """Whether a file's names are those of a library of NVIDIA's. Its device code counts for no promise."""
    names = (posixpath.basename(path), soname or "")
    return parse_library_name(path, soname) is not None or any(
        user_mode.parse_file_name(name) or OF_DRIVER.fullmatch(name) for name in names
    )


def parse_library_name(path: str, soname: str | None) -> tuple[str, str, bool] | None:
    """Return a library's name, the version in its file name, and whether it is static; None if it is none."""
    for name in (posixpath.basename(path), soname or ""):
        match = FILE.fullmatch(name)
        if match and NAMES.fullmatch(match[1]):
            return match[1], match[3].lstrip("."), name.endswith(".a")
    return None
