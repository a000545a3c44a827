"""The functions of a linked ELF file: addresses, sizes, names, code, and which of them are entry points.

x86 instructions have 1 to 15 bytes, so decoding has to start at the beginning of one. Symbols give the
beginnings of functions, and so do the tables for unwinding (.eh_frame, which stripping leaves in place). The
Linux Standard Base (Core, "Exception Frames") and the System V ABI describe the layouts.
"""

from __future__ import annotations

import heapq
import struct
from array import array
from bisect import bisect_right
from dataclasses import dataclass
from itertools import chain, count, islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from imagematrix.audit.binaries.elf import Elf, Section
    from imagematrix.audit.binaries.window import Window

MOST = 2_000_000  # functions of a file, some of them twice
RUN = 1 << 16  # functions to sort at a time
SIZE_BITS = 24  # an address and a size fit into 64 bits
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
ARRAYS = (".preinit_array", ".init_array")
INITIAL = ".init"
MAIN = b"main\0"
POINTER = struct.Struct("<Q")
RELOCATION = struct.Struct("<QIIq")  # place, kind, symbol, addend
# Kinds for x86-64 and aarch64: an address in the same file, and those of a symbol (ABS64, GLOB_DAT).
RELATIVE = frozenset([8, 1027])
SYMBOLIC = frozenset([1, 6, 257, 1025])
MOST_RELOCATIONS = 1_000_000  # relocations
MOST_POINTERS = 10_000
LONGEST_BODY = 2 << 20  # bytes to decode at a time
PADDING = b"\x00\x90\xcc"  # zeros, nop and int3, with which compilers and linkers fill gaps


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbol for a function, or for anything that another file defines.

    `name` is the offset of its name in the file. `dynamic`: it is in the loader's symbol table.
    """

    name: int
    kind: int
    binding: int
    visibility: int
    section: int
    address: int
    size: int
    dynamic: bool


def list_functions(elf: Elf, window: Window) -> tuple[array[int], array[int]]:
    """Return the addresses of the functions, sorted and without repetition, and their sizes, 0 if unknown.

    There may be a million functions. A list of pairs would then take 200 MB.
    """
    starts, sizes = array("Q"), array("I")
    # Functions of .eh_frame and of symbols, some of them twice, each packed into one number.
    symbols = (
        (symbol.address, symbol.size) for symbol in list_symbols(elf, window) if symbol.section != UNDEFINED
    )
    packed = (
        start << SIZE_BITS | min(size, LARGEST)
        for start, size in chain(_list_frames(elf, window), symbols)
        if start in ADDRESSES
    )
    limited = islice(packed, MOST)
    runs: list[array[int]] = []
    while run := array("Q", sorted(islice(limited, RUN))):
        runs.append(run)
    for number in heapq.merge(*runs):
        start, size = number >> SIZE_BITS, number & LARGEST
        if starts and starts[-1] == start:  # the largest size counts
            sizes[-1] = size
        else:
            starts.append(start)
            sizes.append(size)
    return starts, sizes


def list_symbols(elf: Elf, window: Window) -> Iterator[Symbol]:
    """Yield the symbols for functions, and the symbols that other files define."""
    remaining = MOST_SYMBOLS
    for table, texts in TABLES:
        names = next(elf.find_sections(texts), None)
        for section in elf.find_sections(table):
            size = min(section.size, remaining * SYMBOL.size)
            remaining -= size // SYMBOL.size
            for name, info, visibility, index, address, length in _list_rows(window, section, size):
                kind = info & 15
                if names and (kind in (FUNCTION, IFUNC) or (index == UNDEFINED and name)):
                    yield Symbol(
                        name=names.offset + name,
                        kind=kind,
                        binding=info >> 4,
                        visibility=visibility & 3,
                        section=index,
                        address=address,
                        size=length,
                        dynamic=table == ".dynsym",
                    )


def list_names(offsets: Iterable[int], window: Window) -> Iterator[str]:
    """Yield the names at these offsets in the file."""
    for offset in offsets:
        yield window.read_at(offset, LONGEST).partition(b"\0")[0].decode("utf-8", "replace")


def _list_rows(window: Window, section: Section, size: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    step = PIECE // SYMBOL.size * SYMBOL.size
    for at in range(0, size, step):
        raw = window.read_at(section.offset + at, min(step, size - at))
        yield from SYMBOL.iter_unpack(raw[: len(raw) // SYMBOL.size * SYMBOL.size])


def _list_frames(elf: Elf, window: Window) -> Iterator[tuple[int, int]]:
    """Yield the address and the size of each function in .eh_frame, which compilers all encode in one way."""
    for section in elf.find_sections(".eh_frame"):
        at = 0
        while at < section.size:
            raw = window.read_at(section.offset + at, min(PIECE, section.size - at))
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


def list_always_run(elf: Elf, window: Window) -> set[int]:
    """Return the addresses of the functions that always run: the entry point, main and constructors."""
    # Older linkers give a library the address of its first code for an entry.
    addresses = {elf.entry} if elf.entry and elf.program else set()
    addresses.update(
        symbol.address
        for symbol in list_symbols(elf, window)
        if _is_defined_function(symbol) and window.read_at(symbol.name, len(MAIN)) == MAIN
    )
    addresses.update(section.address for section in elf.find_sections(INITIAL))
    addresses.update(_list_constructors(elf, window))
    return addresses


def list_exported(elf: Elf, window: Window) -> Iterator[int]:
    """Yield the addresses of the functions that other files may call."""
    for symbol in list_symbols(elf, window):
        is_exported = symbol.dynamic and symbol.binding != LOCAL and symbol.visibility not in HIDDEN
        if is_exported and _is_defined_function(symbol):
            yield symbol.address


def _is_defined_function(symbol: Symbol) -> bool:
    return symbol.section != UNDEFINED and symbol.kind == FUNCTION


def _list_constructors(elf: Elf, window: Window) -> Iterator[int]:
    arrays = elf.find_sections(*ARRAYS)
    pointers = list_pointers(elf, window, (range(one.address, one.address + one.size) for one in arrays))
    return (address for _, address in pointers)


def list_pointers(elf: Elf, window: Window, places: Iterable[range]) -> Iterator[tuple[int, int]]:
    """Yield the addresses in this file that a process has in its memory at these places, with the places."""
    parts: list[range] = []
    for place in sorted(filter(None, places), key=lambda place: (place.start, -place.stop)):
        if not parts or place.start >= parts[-1].stop:  # only in malformed files do they overlap
            parts.append(place)
    if parts:
        yield from islice(
            chain(_list_stored(elf, window, parts), _list_relocated(elf, window, parts)), MOST_POINTERS
        )


def _list_stored(elf: Elf, window: Window, parts: Sequence[range]) -> Iterator[tuple[int, int]]:
    """Yield the pointers that these parts of memory have in the file."""
    sections = sorted((section for section in elf.sections if section.address), key=_get_address)
    for part in parts:
        index = bisect_right(sections, part.start, key=_get_address) - 1
        section = sections[index] if index >= 0 else None
        if section:
            offset = part.start - section.address
            raw = window.read_at(section.offset + offset, min(len(part), section.size - offset))
            pointers = POINTER.iter_unpack(raw[: len(raw) // POINTER.size * POINTER.size])
            for place, (address,) in zip(count(part.start, POINTER.size), pointers, strict=False):
                if address:
                    yield place, address


def _list_relocated(elf: Elf, window: Window, parts: Sequence[range]) -> Iterator[tuple[int, int]]:
    """Yield the pointers that the loader writes into these parts of memory: those into this file."""
    starts = [part.start for part in parts]
    table = next(elf.find_sections(".dynsym"), None)
    symbols = window.get_part(table.offset, table.size) if table else window.get_part(0, 0)
    for section in elf.find_sections(".rela.dyn"):
        step = RELOCATION.size << 14
        for at in range(0, min(section.size, MOST_RELOCATIONS * RELOCATION.size), step):
            raw = window.read_at(section.offset + at, min(step, section.size - at))
            for place, kind, symbol, addend in RELOCATION.iter_unpack(raw[: len(raw) // 24 * 24]):
                if kind not in RELATIVE and kind not in SYMBOLIC:
                    continue
                index = bisect_right(starts, place) - 1
                if index < 0 or place not in parts[index]:
                    continue
                base = 0 if kind in RELATIVE else _find_symbol_address(symbols, symbol)
                if base is not None:
                    yield place, base + addend


def _find_symbol_address(symbols: Window, number: int) -> int | None:
    """Return the address of a symbol in the loader's table, or None if another file defines it."""
    raw = symbols.read_at(number * SYMBOL.size, SYMBOL.size)
    if len(raw) < SYMBOL.size:
        return None
    _, _, _, section, address, _ = SYMBOL.unpack(raw)
    return address if section != UNDEFINED else None


def make_place(address: int) -> range:
    """Return the place of memory of one pointer."""
    return range(address, address + POINTER.size)


def _get_address(section: Section) -> int:
    return section.address


@dataclass(frozen=True, slots=True)
class Body:
    """The code from an address on.

    `bounded`: it is a function, not bytes between two functions. `continued`: the function goes on after it
    under another name.
    """

    start: int
    size: int
    bounded: bool
    continued: bool = False


class Text:
    """The code in some sections of a file."""

    def __init__(self, elf: Elf, window: Window, sections: Sequence[Section]) -> None:
        self._window = window
        self._sections = sorted(sections, key=_get_address)
        self._starts, self._sizes = list_functions(elf, window)

    def list_bodies(self) -> Iterator[Body]:
        """Yield all code, sorted by address. Bytes between functions are bodies that are not `bounded`."""
        for section in self._sections:
            end = section.address + section.size
            first, last = bisect_right(self._starts, section.address - 1), bisect_right(self._starts, end - 1)
            here = section.address
            for index in range(first, last):
                yield from self._list_gaps(here, self._starts[index])
                body = self._make_body(index, end)
                yield body
                here = body.start + body.size
            yield from self._list_gaps(here, end)

    def find_body(self, address: int) -> Body | None:
        """Return the function that contains an address, or None if none is known."""
        index = bisect_right(self._starts, address) - 1
        section = self._find_section(address)
        if index < 0 or section is None:
            return None
        body = self._make_body(index, section.address + section.size)
        return body if body.start <= address < body.start + body.size else None

    def read_body(self, body: Body) -> bytes:
        """Return the bytes of a body."""
        section = self._find_section(body.start)
        if section is None:
            return b""
        offset = body.start - section.address
        return self._window.read_at(section.offset + offset, min(body.size, section.size - offset))

    @property
    def has_functions(self) -> bool:
        """Whether the file tells where any function begins."""
        return bool(self._starts)

    def _make_body(self, index: int, end: int) -> Body:
        start, size = self._starts[index], self._sizes[index]
        following = self._starts[index + 1] if index + 1 < len(self._starts) else end
        # A function that begins inside another one is a part of it with its own name.
        stop = min(start + size if size else following, following, end, start + LONGEST_BODY)
        return Body(start, stop - start, bounded=size > 0, continued=stop == following < start + size)

    def _list_gaps(self, start: int, end: int) -> Iterator[Body]:
        for here in range(start, end, LONGEST_BODY):
            piece = Body(here, min(LONGEST_BODY, end - here), bounded=False)
            raw = self.read_body(piece)
            code = raw.lstrip(PADDING)
            if code:
                yield Body(here + len(raw) - len(code), len(code), bounded=False)

    def _find_section(self, address: int) -> Section | None:
        index = bisect_right(self._sections, address, key=_get_address) - 1
        section = self._sections[index] if index >= 0 else None
        return section if section and address < section.address + section.size else None
