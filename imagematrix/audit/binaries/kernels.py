"""The kernels in a fatbin: whether it has any, and whether they are of the project to which the file belongs.

The table of section names comes first in a compiler's cubin, and each kernel has a section of code with its
name. Other cubins, such as the handwritten ones of cuBLAS, have kernels of their own in any case. Names are
mangled as in C++, with the length before each identifier: a kernel of the namespace `open3d`, or one that
has a type of it as an argument, has `6open3d` in its name. So a file tells its own kernels from those of
libraries that are linked into it, if it has the name of its project.
"""

from __future__ import annotations

import posixpath
import re

from imagematrix.audit.binaries import elf

MOST = 4096  # bytes of code that are searched for names; the first of a cubin is among the first 200
FIRST = slice(64, 75)  # where that table begins
TABLE = b"\0.shstrtab\0"
CODE = b"\0.text."  # before the name of a section of code
VERSION = b".version"  # the directive that PTX begins with, after comments
ENTRY = re.compile(rb"\.entry\s+([\w$.]+)")  # of a kernel in PTX
PACKAGES = "-packages/"  # the end of the folder of Python packages
NAMESPACE = re.compile(r"[A-Za-z]\w{2,63}", re.ASCII)
# NVIDIA's templates, of which every project makes kernels.
TEMPLATES = frozenset({"cub", "cuda", "cute", "cutlass", "thrust"})


def make_kernel_pattern(path: str) -> re.Pattern[bytes] | None:
    """Return a pattern for the names of a project's kernels by a file's path; None if it shows no name.

    The project has the name of its Python package, or of the file: `libtorch_cuda.so` is of `torch`.
    """
    folder = path.rpartition(PACKAGES)[2].partition("/")[0]
    words = posixpath.basename(path).partition(".")[0].removeprefix("lib").strip("_").split("_")
    names = {folder, *("_".join(words[:number]) for number in range(1, len(words) + 1))}
    namespaces = sorted(name for name in names if NAMESPACE.fullmatch(name) and name.lower() not in TEMPLATES)
    if not namespaces:
        return None
    mangled = "|".join(f"{len(name)}{name}" for name in namespaces)
    return re.compile(rf"(?<!\d)(?:{mangled})".encode(), re.IGNORECASE)


def is_readable(head: bytes) -> bool:
    """Whether code that begins with `head` is a cubin or PTX."""
    return head.startswith(elf.MAGIC) or VERSION in head


def list_kernel_names(head: bytes) -> bytes | None:
    """Return names of kernels in the first MOST bytes of a cubin or of PTX; None if it has no kernels."""
    if head.startswith(elf.MAGIC):
        _, separator, names = head[:MOST].partition(CODE)
        return names if separator or head[FIRST] != TABLE else None
    entries = ENTRY.findall(head[:MOST])
    return b" ".join(entries) if entries or len(head) >= MOST else None
