"""Notes in ELF files: what cuda-compat supports, and the CPU level that code needs."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.audit.binaries.elf import Elf
    from imagematrix.audit.binaries.window import Window

COMPAT = ".note.cuda.fwd_compatibility"
PROPERTIES = ".note.gnu.property"
HEADER = struct.Struct("<III")  # length of the owner, length of the description, type
LARGEST = 1 << 16  # bytes of a section with notes
MOST = 16  # sections with notes
NT_GNU_PROPERTY_TYPE_0 = 5
X86_ISA_1_NEEDED = 0xC0008002  # property of the x86-64 psABI, with a bit for each level
LEVELS = ("x86-64-v1", "x86-64-v2", "x86-64-v3", "x86-64-v4")
CUDA = re.compile(r"\d{1,2}\.\d{1,2}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compat:
    """The note in a libcuda of cuda-compat: its CUDA release, and the kernel branches and brands it supports.

    Brands are NVML's numbers. A key that is absent sets no limit, as on Tegra.
    """

    cuda: str | None = None
    branches: tuple[int, ...] = ()
    brands: tuple[int, ...] = ()


def read_compat(elf: Elf, window: Window) -> Compat | None:
    """Return the note of cuda-compat, None if there is none, or an empty Compat if it is invalid."""
    for section in elf.find_sections(COMPAT):
        raw = window.read_at(section.offset, min(section.size, LARGEST))
        # In some releases, the length in its header is too large.
        start, end = raw.find(b"{"), raw.rfind(b"}")
        try:
            data = json.loads(raw[start : end + 1])
        except (ValueError, RecursionError):
            data = None
        data = {str(key).lower(): value for key, value in data.items()} if isinstance(data, dict) else {}
        cuda = data.get("cuda version")
        return Compat(
            cuda=cuda if isinstance(cuda, str) and CUDA.fullmatch(cuda) else None,
            branches=_list_numbers(data.get("driver")),
            brands=_list_numbers(data.get("device")),
        )
    return None


def read_isa_level(elf: Elf, window: Window) -> str | None:
    """Return the psABI level that the linker noted as needed, or None if it noted none."""
    for section in islice(elf.find_sections(PROPERTIES), MOST):
        for kind, text in _list_notes(window.read_at(section.offset, min(section.size, LARGEST))):
            if kind != NT_GNU_PROPERTY_TYPE_0:
                continue
            bits = next((bits for name, bits in _list_properties(text) if name == X86_ISA_1_NEEDED), 0)
            levels = [level for bit, level in enumerate(LEVELS) if bits >> bit & 1]
            if levels:
                return levels[-1]
    return None


def _list_notes(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the type and the description of each note, which 64-bit files align to 8 bytes."""
    at = 0
    while at + HEADER.size <= len(raw):
        owner, size, kind = HEADER.unpack_from(raw, at)
        start = at + HEADER.size + -(-owner // 4) * 4
        yield kind, raw[start : start + size]
        at = start + -(-size // 8) * 8


def _list_properties(raw: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while at + 8 <= len(raw):
        kind, size = struct.unpack_from("<II", raw, at)
        yield kind, int.from_bytes(raw[at + 8 : at + 8 + min(size, 8)], "little")
        at += 8 + -(-size // 8) * 8


def _list_numbers(value: object) -> tuple[int, ...]:
    return tuple(sorted({item for item in value if type(item) is int})) if isinstance(value, list) else ()
