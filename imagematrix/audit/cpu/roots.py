"""Entry points of a file: its first instruction, main, its constructors, the functions that it exports."""

from __future__ import annotations

import struct

from imagematrix.audit.cpu import functions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.audit.cpu.functions import Symbol
    from imagematrix.audit.elf import Elf
    from imagematrix.audit.window import Window

__all__ = ["exported", "first"]

ARRAYS = (".preinit_array", ".init_array")
INITIAL = ".init"
MAIN = b"main\0"
POINTER = struct.Struct("<Q")
RELOCATION = struct.Struct("<QQq")  # place, kind, addend
RELATIVE = frozenset([8, 1027])  # kinds for x86-64 and aarch64: an address in the same file
MOST = 1_000_000  # relocations
MOST_POINTERS = 10_000


def first(elf: Elf, window: Window) -> set[int]:
    """Return the addresses of the functions that always run: the entry point, main and constructors."""
    addresses = {elf.entry} if elf.entry else set()
    addresses.update(
        one.address
        for one in functions.symbols(elf, window)
        if _here(one) and window.at(one.place, len(MAIN)) == MAIN
    )
    addresses.update(section.address for section in elf.named(INITIAL))
    addresses.update(_constructors(elf, window))
    return addresses


def exported(elf: Elf, window: Window) -> Iterator[int]:
    """Yield the addresses of the functions that other files may call."""
    for one in functions.symbols(elf, window):
        if (
            _here(one)
            and one.dynamic
            and one.binding != functions.LOCAL
            and one.visibility not in functions.HIDDEN
        ):
            yield one.address


def _here(one: Symbol) -> bool:
    return one.section != functions.UNDEFINED and one.kind == functions.FUNCTION


def _constructors(elf: Elf, window: Window) -> Iterator[int]:
    arrays = list(elf.named(*ARRAYS))
    for array in arrays:
        raw = window.at(array.offset, min(array.size, MOST_POINTERS * POINTER.size) // 8 * 8)
        yield from (address for (address,) in POINTER.iter_unpack(raw[: len(raw) // 8 * 8]) if address)
    # In position-independent files, the loader fills in the pointers by relocations.
    for section in elf.named(".rela.dyn") if arrays else ():
        step = RELOCATION.size << 14
        for at in range(0, min(section.size, MOST * RELOCATION.size), step):
            raw = window.at(section.offset + at, min(step, section.size - at))
            for place, kind, address in RELOCATION.iter_unpack(raw[: len(raw) // 24 * 24]):
                if kind in RELATIVE and any(one.address <= place < one.address + one.size for one in arrays):
                    yield address
