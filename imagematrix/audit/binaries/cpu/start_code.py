"""The functions that start code calls, or passes to the C library, such as main, which may have no symbol.

The entry function passes main's address, or that of a place in itself that jumps to main. In musl's programs
it calls another function that does, and in static ones that are position-independent, that one calls a third
by its address. No table tells how long they are, but along with main's address they pass that of _init.
"""

from __future__ import annotations

from imagematrix.audit.binaries.cpu import functions
from imagematrix.audit.binaries.cpu.functions import Body

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.audit.binaries.cpu.decoder import Decoder
    from imagematrix.audit.binaries.cpu.functions import Text
    from imagematrix.audit.binaries.elf import Elf
    from imagematrix.audit.binaries.window import Window

STEPS = 3  # functions from the entry function to the one that passes main's address
LONGEST = 1 << 10  # bytes of one of them; musl's have up to 445
MOST = 256  # places to which one step leads


def find_started(elf: Elf, window: Window, text: Text, decoder: Decoder) -> set[int]:
    """Return the addresses that a program's start code calls or passes to the C library."""
    if not elf.program:
        return set()  # older linkers give a library the address of its first code for an entry
    initial = {section.address for section in elf.find_sections(functions.INITIAL)}
    entry = text.find_body(elf.entry)
    bodies = [entry or Body(elf.entry, LONGEST, bounded=False)]
    started: set[int] = set()
    for _ in range(STEPS):
        reached: set[int] = set()
        for target, passed in _list_calls(elf, window, text, decoder, bodies):
            reached |= {target, *passed}
            if bodies == [entry]:
                started |= {target, *passed}
            elif not initial.isdisjoint(passed):
                started |= passed
        bodies = [Body(address, LONGEST, bounded=False) for address in sorted(reached)[:MOST]]
    return started


def _list_calls(
    elf: Elf, window: Window, text: Text, decoder: Decoder, bodies: Iterable[Body]
) -> Iterator[tuple[int, set[int]]]:
    """Yield the target of each call and jump in these bodies, and the addresses that are computed for it."""
    calls = [call for body in bodies for call in decoder.list_calls(text.read_body(body), body.start)]
    places = (functions.make_place(slot) for call in calls for slot in call.slots)
    pointers = dict(functions.list_pointers(elf, window, places))
    for call in calls:
        yield call.target, {*call.addresses, *(pointers[slot] for slot in call.slots if slot in pointers)}
