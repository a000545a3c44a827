"""Cubins: NVIDIA's device code for one target, as ELF files; their target, compiler and size.

The flags in the header state the target, in two layouts by the version of the ABI. Up to version 7, the ELF
version in the header is the release of the compiler: 124 for 12.4. Cubins of CUDA 13, and those for targets
from 100 on, name it in a note instead. NVIDIA documents none of this. It was derived from the output of
NVRTC 11.8 to 13.5, and results were compared with cuobjdump.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from imagematrix.audit.binaries import elf
from imagematrix.audit.binaries.device_code import DeviceCode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.audit.binaries.window import Window

HEAD = 64  # bytes of an ELF header
# The end of the ELF header by class, from the flags on, and where it begins.
FLAGS = {1: 36, 2: 48}
NEW_ABI = 8  # ABI version of cubins from CUDA 13's compilers, and of cubins for targets from 100 on
TARGETS = range(10, 1000)
PACKED = 2 * HEAD  # compressed bytes that have the header in them
FAR = 1 << 16  # bytes that are searched for notes where sections cannot be read
NUMBERED = range(65, 200)  # values of releases in ELF headers
TOOLKIT = ".note.nv.tkinfo"  # the section with the compiler's name and its command line
NAMED = re.compile(rb"Cuda compilation tools, release (\d{1,2}\.\d{1,2})\b")
FAMILY = re.compile(rb"-arch[ =](?:sm|compute)_(\d{2,3}f)\b")
# The first releases with the new ABI: for targets from FIRST_TARGET on, and for all.
FIRST_TARGET, FIRST_CUDA = 100, ("12.8", "13.0")
# From CUDA 13.0 on, a section states the "a". It lists attributes: form, number, and a value or its size.
ATTRIBUTES, ATTRIBUTE = ".nv.compat", struct.Struct("<BBH")
SIZED, OF_ONE = 4, 9  # form with the size of a value; attribute of code for exactly one capability
# No older target has an "a", but cuBLAS's handwritten kernels for 50, 60 and 61 set the bit.
FIRST_SPECIFIC = 90
# The header of 64-bit cubins, which are all but the oldest: after identification, type and machine.
BEGINNING = elf.MAGIC + b"\x02\x01\x01"
HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION, SEGMENT = 64, 56  # bytes of the header of a section and of a segment
MOST_SECTIONS = 20_000


@dataclass(frozen=True, slots=True)
class _Header:
    """What the ELF header of a cubin states of its code. `target` is a number; `specific`: only for this one.

    `version` is the release of its compiler, unless the ABI is `new`.
    """

    new: bool
    version: int
    target: int
    specific: bool


def read_cubin(window: Window) -> DeviceCode:
    """Return the device code of a cubin file."""
    header = _parse_header(window.read_at(0, HEAD))
    if header is None or header.target not in TARGETS:
        return DeviceCode(damaged=True)
    specific = header.target >= FIRST_SPECIFIC and (header.specific or OF_ONE in _list_attributes(window))
    # Code for a family has the same flags as plain code; only the note tells.
    family = FAMILY.search(window.read_at(0, FAR)) if header.new and not specific else None
    target = family[1].decode() if family else f"{header.target}{'a' if specific else ''}"
    release = find_release(window)
    return DeviceCode(
        cubins=frozenset([target]),
        toolkits=frozenset([release] if release else []),
        sizes=((f"sm_{target}", window.size),),
    )


def measure_cubin(window: Window) -> int | None:
    """Return the size of the cubin at the beginning of `window`, or None if something else is there."""
    head = window.read_at(0, HEADER.size)
    if len(head) < HEADER.size:
        return None
    fields = HEADER.unpack(head)
    _, _, machine, _, _, segments, sections, _, length, width, count, height, rows, _ = fields
    ends = [length, segments + width * count, sections + height * rows]
    has_sizes = length == HEADER.size and height == SECTION and width in (0, SEGMENT)
    if machine != elf.CUDA or not has_sizes or not 0 < rows < MOST_SECTIONS or max(ends) > window.size:
        return None
    headers = elf.read_elf(window)
    if headers is None or headers.damaged:
        return None
    return int(max(*ends, *(section.offset + section.size for section in headers.sections if section.size)))


def find_release(window: Window) -> str | None:
    """Return the CUDA release whose compiler made the cubin in `window`, None if the bytes state none."""
    header = _parse_header(window.read_at(0, HEAD))
    if header is None or not header.new:
        return _get_release(header)
    headers = elf.read_elf(window)
    section = next(headers.find_sections(TOOLKIT), None) if headers else None
    text = window.read_at(section.offset, min(section.size, FAR)) if section else window.read_at(0, FAR)
    return _find_release_in_note(text, header)


def find_packed_release(payload: Window, *, zstandard: bool, notes: bool) -> str | None:
    """Return the release that made a cubin that may be compressed.

    A note is read only with `notes`; without it, the first release that writes such cubins counts.
    """
    if payload.read_at(0, len(elf.MAGIC)) == elf.MAGIC:
        return find_release(payload)
    head = unpack(payload.read_at(0, FAR if zstandard else PACKED), HEAD, zstandard=zstandard)
    header = _parse_header(head) if head.startswith(elf.MAGIC) else None
    if header is None or not header.new:
        return _get_release(header)
    text = unpack(payload.read_at(0, FAR), FAR, zstandard=zstandard) if notes else b""
    return _find_release_in_note(text, header)


def unpack(packed: bytes, most: int, *, zstandard: bool) -> bytes:
    """Return the first bytes of compressed code, fewer if it is damaged."""
    if not zstandard:
        return _unpack_lz4(packed, most)
    from zstandard import ZstdDecompressor, ZstdError  # the zipapp for nodes does not have it

    try:
        # A frame may ask for gigabytes of memory; zstd's own command stops at the same limit.
        return ZstdDecompressor(max_window_size=1 << 27).stream_reader(packed).read(most)
    except ZstdError:
        return b""


def _parse_header(head: bytes) -> _Header | None:
    """Return what an ELF header of HEAD bytes states, or None if it is truncated or invalid."""
    place = FLAGS.get(head[4]) if len(head) == HEAD else None
    if place is None:
        return None
    version, flags = (int.from_bytes(head[at : at + 4], "little") for at in (20, place))
    if head[8] >= NEW_ABI:
        return _Header(new=True, version=version, target=flags >> 8 & 0xFFFF, specific=bool(flags & 1 << 3))
    return _Header(new=False, version=version, target=flags & 0xFF, specific=bool(flags & 1 << 11))


def _get_release(header: _Header | None) -> str | None:
    if header is None or header.version not in NUMBERED:
        return None
    return f"{header.version // 10}.{header.version % 10}"


def _find_release_in_note(text: bytes, header: _Header) -> str:
    match = NAMED.search(text)
    return match[1].decode() if match else FIRST_CUDA[header.target < FIRST_TARGET]


def _list_attributes(window: Window) -> set[int]:
    """Return the numbers of the attributes in a cubin whose value or size is not zero."""
    headers = elf.read_elf(window)
    section = next(headers.find_sections(ATTRIBUTES), None) if headers else None
    raw = window.read_at(section.offset, min(section.size, FAR)) if section else b""
    attributes = set()
    at = 0
    while at + ATTRIBUTE.size <= len(raw):
        form, attribute, value = ATTRIBUTE.unpack_from(raw, at)
        at += ATTRIBUTE.size + (value if form == SIZED else 0)
        if value:
            attributes.add(attribute)
    return attributes


def _unpack_lz4(raw: bytes, most: int) -> bytes:
    """Return the first bytes of an LZ4 block, fewer if it is truncated or damaged.

    https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md
    """
    unpacked = bytearray()
    at = 0
    while at < len(raw) and len(unpacked) < most:
        token = raw[at]
        literals, at = _read_length(raw, at + 1, token >> 4)
        unpacked += raw[at : at + literals]
        at += literals
        back = int.from_bytes(raw[at : at + 2], "little")
        if not 0 < back <= len(unpacked) or at + 2 > len(raw):
            break
        repeats, at = _read_length(raw, at + 2, token & 15)
        repeats = min(repeats + 4, most)
        sequence = unpacked[-back:] * (repeats // back + 1)
        unpacked += sequence[:repeats]
    return bytes(unpacked[:most])


def _read_length(raw: bytes, at: int, length: int) -> tuple[int, int]:
    """Return a length whose first part is `length`, and the offset after its other bytes."""
    more = 255 if length == 15 else 0  # noqa: PLR2004 - the largest first part
    while more == 255 and at < len(raw):  # noqa: PLR2004 - a byte that is continued
        more = raw[at]
        length += more
        at += 1
    return length, at
