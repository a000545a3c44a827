"""The versions of libraries through which the ranks of a job talk, as the bytes of the libraries state them.

Packages are no proof: two may install the same path, and the last one wins. What a library states is in the
texts that its program prints.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.audit.binaries.elf import Elf
    from imagematrix.audit.binaries.window import Window

SEARCHED = 64 << 20  # bytes
OVERLAP = 256  # more bytes than any of the texts below has
VERSION = rb"(\d{1,5}(?:\.\d{1,5}){1,3}[a-z0-9]{0,16})"
LINKED = "nccl"  # the library that programs may have linked into them
REGISTERED = ".nvFatBinSegment"  # the section that registers fatbins with CUDA's runtime, as NCCL does
NCCL = re.compile(rb"NCCL version " + VERSION + rb"(?:\+cuda\d|\0| compiled)")


@dataclass(frozen=True, slots=True)
class StatedLibrary:
    """A library by its file names; `texts` are its implementations, each with the text that has its version.

    The implementations of MPI are told apart in the version, since their ranks cannot talk to each other.
    """

    name: str
    files: re.Pattern[str]
    texts: tuple[tuple[str, re.Pattern[bytes]], ...]


def _make_file_pattern(stem: str) -> re.Pattern[str]:
    # auditwheel adds a hash to the names of the libraries that it copies into a wheel.
    return re.compile(rf"lib{stem}(?:-[0-9a-f]{{8}})?\.so(?:\.\d+)*", re.ASCII)


LIBRARIES = (
    StatedLibrary(LINKED, _make_file_pattern("nccl"), (("", NCCL),)),
    StatedLibrary(
        "rccl", _make_file_pattern("rccl"), (("", re.compile(rb"RCCL version (?:: )?" + VERSION)),)
    ),
    StatedLibrary(
        "mpi",
        _make_file_pattern(r"mpi(?:ch|_abi|_ibm|_cray|_(?:gnu|intel|nvidia)\w*)?"),
        (
            ("openmpi-", re.compile(rb"%s:version:full\0v" + VERSION + rb"\0")),
            ("mpich-", re.compile(rb":\d\d:\d\d [A-Z]{2,5} \d{4}\0" + VERSION + rb"\0")),
            ("intelmpi-", re.compile(rb"Intel\(R\) MPI Library %s for Linux\* OS\n\0" + VERSION + rb"\0")),
        ),
    ),
    StatedLibrary(
        "pmix",
        _make_file_pattern("pmix"),
        (("", re.compile(rb"PMIx v?" + VERSION + rb" \(PMIx Standard")),),
    ),
)
NAMES = frozenset(library.name for library in LIBRARIES)


def identify_library(path: str, headers: Elf, window: Window) -> tuple[str, str | None] | None:
    """Return the library that a file is, or has linked into it, with its version, None if it states none.

    Of the libraries that are linked into a program, only NCCL is recognized.
    """
    if not headers.linked:
        return None
    for file in (headers.soname or "", posixpath.basename(path)):
        for library in LIBRARIES:
            if library.files.fullmatch(file):
                versions = ((maker, _find_version(text, headers, window)) for maker, text in library.texts)
                stated = (f"{maker}{version}" for maker, version in versions if version)
                return library.name, next(stated, None)
    if any(headers.find_sections(REGISTERED)) and not any(
        name.startswith("libnccl.so") for name in headers.needed
    ):
        version = _find_version(NCCL, headers, window)
        return (LINKED, version) if version else None
    return None


def _find_version(text: re.Pattern[bytes], headers: Elf, window: Window) -> str | None:
    section = next(headers.find_sections(".rodata"), None)
    constants = window.get_part(section.offset, section.size) if section else window
    matches = map(text.search, constants.list_pieces(SEARCHED, OVERLAP))
    return next((match[1].decode() for match in matches if match), None)
