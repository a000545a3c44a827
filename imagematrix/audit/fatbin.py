"""NVIDIA's device code as toolkits store it: fatbins, cubins and PTX.

A fatbin is a header (magic, version, size of the header, size of what follows) and entries, each with a
header of its own. That of an entry tells all there is to know, so nothing is decompressed. From CUDA 13.4 on,
`nvcc --concat` compresses the code for several targets as one entry, whose header has a table of them. NVIDIA
documents none of this; the layout was read from what fatbinary of CUDA 11.8 to 13.5 writes, and cuobjdump
judges it.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice

from imagematrix.audit import elf
from imagematrix.audit.device_code import NONE, DeviceCode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.audit.window import Window

__all__ = [
    "CUBIN",
    "EM_CUDA",
    "HEADER",
    "MAGIC",
    "PTX",
    "Container",
    "Entry",
    "containers",
    "cubin",
    "fatbins",
    "ptx",
]

MAGIC = b"\x50\xed\x55\xba"
HEADER = struct.Struct("<IHHQ")  # magic, version, size of the header, bytes behind it
ENTRY = struct.Struct("<HHIQ8sHHI8sQ")  # kind, version, size of header and payload, -, ISA, target, -, flags
SMALLEST = 48  # bytes of an entry's header that `ENTRY` is
PTX, CUBIN = 1, 2  # kinds; others are intermediate code, which no driver loads
CONCATENATED = 256  # a kind: code for several targets
FIXED = 64  # bytes of an entry's header before what only some have, such as options and a table
TABLE = struct.Struct("<II")  # of parts, each with a header like that of an entry: how many, bytes of all
OPTIONS = struct.Struct("<IIB")  # where they are, their size, -
SPECIFIC = 1 << 20  # flags: "a", of exactly one capability
FAMILY = 1 << 21  # "f", of a family
ZSTD = 1 << 15
TARGETS = range(10, 1000)
ALIGNED = 8
PIECE = 1 << 16
MOST = 100_000  # entries of a fatbin; cuBLAS has some hundred

EM_CUDA = 190  # machine number of NVIDIA's device code in ELF headers
ELF_HEADER = 64
FLAGS = {1: 36, 2: 48}  # where e_flags are in an ELF header, by its class
NEW_ABI = 8  # of cubins, from CUDA 13's compilers on and for targets from 100 on
# From CUDA 13.0 on, a section has the "a": attributes of two bytes, with a value or with the size of one.
ATTRIBUTES, ATTRIBUTE = ".nv.compat", struct.Struct("<BBH")
SIZED, OF_ONE = 4, 9
# Older code has no "a": that bit is set in cuBLAS's handwritten kernels for 50, 60 and 61.
FIRST_SPECIFIC = 90
NOTE = re.compile(rb"-arch[ =](?:sm|compute)_(\d{2,3}f)\b")  # how ptxas was called, in .note.nv.tkinfo
# What is before them are comments and empty lines.
DIRECTIVES = re.compile(
    rb"^\s*\.version\s+(\d+\.\d+)\s.*?^\s*\.target\s+sm_(\d{2,3}[af]?)\b", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Entry:
    """The device code for one target in a container: `size` bytes from `offset` on, its header included.

    `kind` is PTX, CUBIN or another number, `target` and `isa` are those of the compiler ("90a", "8.4"), and
    `whole` says whether the header makes sense and all of the entry is there. `parts` are what one of the
    kind CONCATENATED holds, each with its share of the stored bytes as its size.
    """

    offset: int
    size: int
    kind: int
    target: str
    isa: str
    flags: int
    whole: bool
    parts: tuple[Entry, ...] = ()

    @property
    def code(self) -> tuple[Entry, ...]:
        """Its parts, or itself: what is for one target each."""
        return self.parts or (self,)


@dataclass(frozen=True, slots=True)
class Container:
    """A fatbin, from `offset` to `end`, with the device code of one module for several targets.

    `whole` is False where it is cut short or has more entries than any compiler writes.
    """

    offset: int
    end: int
    entries: tuple[Entry, ...]
    whole: bool


def fatbins(window: Window) -> DeviceCode:
    """Return what the fatbins in a section or a file have; those of older toolkits have gaps between them."""
    cubins: set[str] = set()
    texts: set[tuple[str, str]] = set()
    compressed = damaged = False
    with_ptx: set[bool] = set()
    sizes: Counter[str] = Counter()
    for container in containers(window):
        entries = [entry for entry in container.entries if entry.whole]
        damaged = damaged or not container.whole or len(entries) < len(container.entries)
        code = [one for entry in entries for one in entry.code if one.kind in (CUBIN, PTX)]
        cubins.update(entry.target for entry in code if entry.kind == CUBIN)
        texts.update((entry.target, entry.isa) for entry in code if entry.kind == PTX)
        compressed = compressed or any(entry.flags & ZSTD for entry in code)
        for entry in code:
            sizes[f"{'sm' if entry.kind == CUBIN else 'compute'}_{entry.target}"] += entry.size
        if code:
            with_ptx.add(any(entry.kind == PTX for entry in code))
    return DeviceCode(
        cubins=frozenset(cubins),
        ptx=frozenset(texts),
        compressed=compressed,
        scattered=len(with_ptx) > 1,
        damaged=damaged,
        sizes=tuple(sorted(sizes.items())),
    )


def containers(window: Window) -> Iterator[Container]:
    """Yield the fatbins in a section or a file."""
    at = 0
    while at < window.size:
        head = window.at(at, HEADER.size)
        if head[:4] != MAGIC:
            at = _next(window, at)
            continue
        if len(head) < HEADER.size:
            yield Container(at, window.size, (), whole=False)
            return
        _, _, skipped, size = HEADER.unpack(head)
        end = at + skipped + size
        entries = tuple(
            islice(_entries(window, at + max(skipped, HEADER.size), min(end, window.size)), MOST + 1)
        )
        whole = end <= window.size and len(entries) <= MOST
        end = min(end, window.size)
        yield Container(at, end, entries[:MOST], whole)
        at = -(-max(end, at + HEADER.size) // ALIGNED) * ALIGNED


def _entries(window: Window, at: int, end: int) -> Iterator[Entry]:
    left = MOST  # parts
    while at + SMALLEST <= end:
        kind, _, own, payload, _, minor, major, number, _, flags = ENTRY.unpack(window.at(at, SMALLEST))
        size = max(own, SMALLEST) + payload
        whole = own >= SMALLEST and at + size <= end
        sound = whole and (number in TARGETS or kind == CONCATENATED)
        entry = Entry(at, size, kind, _target(number, flags), f"{major}.{minor}", flags, sound)
        if kind == CONCATENATED and whole:
            parts = _parts(window.part(at + FIXED, own - FIXED), entry, left)
            left -= len(parts)
            entry = replace(entry, parts=parts, whole=bool(parts))
        yield entry
        at += size


def _parts(table: Window, entry: Entry, most: int) -> tuple[Entry, ...]:
    """Return what an entry holds by its table; nothing if that makes no sense or has more than `most`."""
    try:
        listed = list(_listed(table, most))
    except struct.error:  # it is cut short
        return ()
    total = sum(part.size for part in listed)
    if not total or not all(part.whole for part in listed):
        return ()
    compressed = entry.flags & ZSTD
    return tuple(
        replace(
            part,
            offset=entry.offset,
            size=entry.size * (part.offset + part.size) // total - entry.size * part.offset // total,
            flags=part.flags | compressed,
        )
        for part in listed
    )


def _listed(table: Window, most: int) -> Iterator[Entry]:
    """Yield what a table lists, with the places before compression; one is not whole if the table is wrong.

    In place of the sizes of header and payload, a part's header has place and size.
    """
    number_of_parts, end = TABLE.unpack(table.at(0, TABLE.size))
    right = number_of_parts <= most and end == table.size
    at = TABLE.size
    while right and at < end:
        head = table.at(at, FIXED + OPTIONS.size)
        kind, _, offset, size, more, minor, major, number, _, flags = ENTRY.unpack_from(head)
        at += FIXED
        if any(more[4:]):  # it has options
            _, options_size, _ = OPTIONS.unpack_from(head, FIXED)
            at += -(-(OPTIONS.size + options_size) // ALIGNED) * ALIGNED
        number_of_parts -= 1
        right = number_of_parts >= 0 and (at < end or (at == end and not number_of_parts))
        sound = right and number in TARGETS
        yield Entry(offset, size, kind, _target(number, flags), f"{major}.{minor}", flags, sound)


def _target(number: int, flags: int) -> str:
    return f"{number}{'a' if flags & SPECIFIC else 'f' if flags & FAMILY else ''}"


def _next(window: Window, at: int) -> int:
    """Return where the next fatbin begins, from `at` on, or the end."""
    while at < window.size:
        piece = window.at(at, PIECE + len(MAGIC) - 1)
        offset = piece.find(MAGIC)
        while offset != -1 and (at + offset) % ALIGNED:
            offset = piece.find(MAGIC, offset + 1)
        if offset != -1:
            return at + offset
        at += PIECE
    return window.size


def cubin(window: Window) -> DeviceCode:
    """Return the target of a cubin that is a file of its own."""
    head = window.at(0, ELF_HEADER)
    place = FLAGS.get(head[4]) if len(head) == ELF_HEADER else None
    if place is None:
        return DeviceCode(damaged=True)
    flags = int.from_bytes(head[place : place + 4], "little")
    if head[8] >= NEW_ABI:
        number, specific = flags >> 8 & 0xFFFF, flags & 1 << 3
    else:
        number, specific = flags & 0xFF, flags & 1 << 11
    if number not in TARGETS:
        return DeviceCode(damaged=True)
    specific = number >= FIRST_SPECIFIC and (specific or OF_ONE in _attributes(window))
    # The flags of a family's code are those of plain code.
    family = NOTE.search(window.at(0, PIECE)) if head[8] >= NEW_ABI and not specific else None
    target = family[1].decode() if family else f"{number}{'a' if specific else ''}"
    return DeviceCode(cubins=frozenset([target]), sizes=((f"sm_{target}", window.size),))


def _attributes(window: Window) -> set[int]:
    """Return the attributes of a cubin that have a value."""
    headers = elf.read(window)
    section = next(headers.named(ATTRIBUTES), None) if headers else None
    raw = window.at(section.offset, min(section.size, PIECE)) if section else b""
    attributes = set()
    at = 0
    while at + ATTRIBUTE.size <= len(raw):
        form, attribute, value = ATTRIBUTE.unpack_from(raw, at)
        at += ATTRIBUTE.size + (value if form == SIZED else 0)
        if value:
            attributes.add(attribute)
    return attributes


def ptx(window: Window) -> DeviceCode:
    """Return what a file of PTX is made for; none where it is something else."""
    match = DIRECTIVES.search(window.at(0, PIECE))
    if match is None:
        return NONE
    target = match[2].decode()
    return DeviceCode(
        ptx=frozenset([(target, match[1].decode())]), sizes=((f"compute_{target}", window.size),)
    )
