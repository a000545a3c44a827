"""Finding the functions of a linked ELF file: their addresses, sizes and names.

x86 instructions have 1 to 15 bytes, so decoding has to start at the beginning of one. Symbols give the
beginnings of functions, and so do the tables for unwinding (.eh_frame, which stripping leaves in place). The
Linux Standard Base (Core, "Exception Frames") and the System V ABI describe the layouts.
"""

from __future__ import annotations

import heapq
import struct
from array import array
from dataclasses import dataclass
from itertools import chain, islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.audit.elf import Elf, Section
    from imagematrix.audit.window import Window

__all__ = ["GLOBAL", "HIDDEN", "IFUNC", "UNDEFINED", "Symbol", "functions", "names", "symbols"]

MOST = 2_000_000  # functions of a file, some of them twice
RUN = 1 << 16  # functions to sort at a time
SIZE_BITS = 24
LARGEST = (1 << SIZE_BITS) - 1  # bytes of a function
ADDRESSES = range(1 << 64 - SIZE_BITS)  # linked files have no higher addresses
MOST_SYMBOLS = 4_000_000
PIECE = 1 << 20
LONGEST = 200  # bytes of a name
FRAME = struct.Struct("<IIiI")  # length, distance to the common information entry, function's begin and size
BEGIN = 8  # offset of the function's begin, which is relative to this place
LONG = 0xFFFFFFFF  # in place of the length of an entry with a 64-bit length
SYMBOL = struct.Struct("<IBBHQQ")  # name, type and binding, visibility, section, address, size
FUNCTION, IFUNC = 2, 10  # types of symbols
LOCAL, GLOBAL = 0, 1  # bindings, among others
HIDDEN = (1, 2)  # visibilities: internal and hidden
UNDEFINED = 0  # section of a symbol that another file defines
TABLES = ((".symtab", ".strtab"), (".dynsym", ".dynstr"))


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbol for a function, or for anything that another file defines.

    `place` is the offset of its name in the file. `dynamic`: it is in the loader's symbol table.
    """

    place: int
    kind: int
    binding: int
    visibility: int
    section: int
    address: int
    size: int
    dynamic: bool


def functions(elf: Elf, window: Window) -> tuple[array[int], array[int]]:
    """Return the addresses of the functions, sorted and without repetition, and their sizes, 0 if unknown.

    There may be a million functions. A list of pairs would then take 200 MB.
    """
    starts, sizes = array("Q"), array("I")
    packed = islice(_packed(elf, window), MOST)
    runs: list[array[int]] = []
    while run := array("Q", sorted(islice(packed, RUN))):
        runs.append(run)
    for one in heapq.merge(*runs):
        start, size = one >> SIZE_BITS, one & LARGEST
        if starts and starts[-1] == start:  # the largest size counts
            sizes[-1] = size
        else:
            starts.append(start)
            sizes.append(size)
    return starts, sizes


def symbols(elf: Elf, window: Window) -> Iterator[Symbol]:
    """Yield the symbols for functions, and the symbols that other files define."""
    left = MOST_SYMBOLS
    for table, texts in TABLES:
        named = next(elf.named(texts), None)
        for section in elf.named(table):
            size = min(section.size, left * SYMBOL.size)
            left -= size // SYMBOL.size
            for name, info, visibility, place, address, length in _rows(window, section, size):
                kind = info & 15
                if named and (kind in (FUNCTION, IFUNC) or (place == UNDEFINED and name)):
                    yield Symbol(
                        place=named.offset + name,
                        kind=kind,
                        binding=info >> 4,
                        visibility=visibility & 3,
                        section=place,
                        address=address,
                        size=length,
                        dynamic=table == ".dynsym",
                    )


def names(places: Iterable[int], window: Window) -> Iterator[str]:
    """Yield the names at these offsets in the file."""
    for place in places:
        yield window.at(place, LONGEST).partition(b"\0")[0].decode("utf-8", "replace")


def _packed(elf: Elf, window: Window) -> Iterator[int]:
    """Yield the address and the size of each function, packed into one number; some functions come twice."""
    named = ((one.address, one.size) for one in symbols(elf, window) if one.section != UNDEFINED)
    for start, size in chain(_frames(elf, window), named):
        if start in ADDRESSES:
            yield start << SIZE_BITS | min(size, LARGEST)


def _rows(window: Window, section: Section, size: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    step = PIECE // SYMBOL.size * SYMBOL.size
    for at in range(0, size, step):
        raw = window.at(section.offset + at, min(step, size - at))
        yield from SYMBOL.iter_unpack(raw[: len(raw) // SYMBOL.size * SYMBOL.size])


def _frames(elf: Elf, window: Window) -> Iterator[tuple[int, int]]:
    """Yield the address and the size of each function in .eh_frame, which compilers all encode in one way."""
    for section in elf.named(".eh_frame"):
        at = 0
        while at < section.size:
            raw = window.at(section.offset + at, min(PIECE, section.size - at))
            here = 0
            while here <= len(raw) - FRAME.size:
                length, common, begin, size = FRAME.unpack_from(raw, here)
                if length == LONG:
                    return
                if length and common:
                    yield section.address + at + here + BEGIN + begin, size
                here += 4 + length
            if not here:
                return
            at += here
