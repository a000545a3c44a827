"""Decoding the code of a file: which flags its functions need, and which of them it can't run without.

A flag is required where code with it is reached from where the file is entered, by calls and jumps, and
nothing in the file can tell one CPU from another. Where something can, that holds for what runs first and
does not ask: main and the constructors themselves. A function whose name says which CPU it is for counts as
chosen by the CPU.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Protocol

from imagematrix.audit.cpu import dispatch, functions
from imagematrix.audit.cpu.arm import Arm
from imagematrix.audit.cpu.roots import roots
from imagematrix.audit.cpu.text import Text
from imagematrix.audit.elf import AARCH64, CODE, X86_64
from imagematrix.audit.host_code import NAMES, Carriers, HostCode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Iterator, Mapping

    from imagematrix.audit.elf import Elf
    from imagematrix.audit.window import Window

__all__ = ["Decoder", "decodable", "scan"]

FEW = 8  # instructions with a flag, in what may be data; fewer are no evidence
NAMED = 5  # functions whose names are told for each flag
LINKAGE = ".plt"  # beginning of the names of sections with calls of other files
WIDE = b"\x02\x01"  # 64 bits, little end first
MACHINES = (X86_64, AARCH64)


class Decoder(Protocol):
    """What decodes the functions of one machine."""

    def codes(self, body: bytes) -> frozenset[int]:
        """Return the kinds of instructions in a function."""

    def sound(self, codes: frozenset[int]) -> bool:
        """Whether all of a function is instructions."""

    def asks(self, codes: frozenset[int]) -> bool:
        """Whether a function asks which CPU it runs on."""

    def flags(self, codes: frozenset[int]) -> frozenset[str]:
        """Return the flags beyond the baseline that instructions need."""

    def counted(self, body: bytes) -> Counter[str]:
        """Return how many instructions need each flag."""

    def targets(self, body: bytes, address: int) -> Iterator[int]:
        """Yield the addresses that a function at an address calls or jumps to."""

    def taken(self, body: bytes, address: int) -> Iterator[int]:
        """Yield the addresses that a function takes, as of another to be called later."""


def decodable(elf: Elf, window: Window) -> bool:
    """Whether a file is a program or a library with code that can be decoded."""
    return elf.linked and elf.machine in MACHINES and window.at(4, len(WIDE)) == WIDE


def scan(path: str, elf: Elf, window: Window) -> HostCode:
    """Return what the code of a `decodable` file needs; without a decoder for it, nothing is known."""
    sections = [one for one in elf.sections if one.flags & CODE and not one.name.startswith(LINKAGE)]
    if not sections:
        return HostCode(whole=False)
    decoder = _decoder(elf.machine)
    if decoder is None:
        return HostCode(whole=False)
    text = Text(elf, window, sections)
    carriers, asking = _carriers(text, decoder)
    flags = _union(carriers.values())
    if not flags:
        return HostCode(whole=text.known)
    named = _named(elf, window, carriers.keys())
    by_name = {start for start, names in named.items() if any(map(dispatch.chosen, names))}
    if dispatch.chosen_file(path) or dispatch.chosen_file(elf.soname or ""):
        by_name = set(carriers)
    signs = (["cpuid"] if asking else []) + sorted(set(dispatch.signs(elf, window)))
    entered = roots(elf, window)
    free = {start: own for start, own in carriers.items() if start not in by_name}
    if signs:
        first = entered.first | _mains(elf, text, decoder)
        bodies = [body for address in first if (body := text.body(address)) and body.bounded]
        required = _union(free.get(body.start, ()) for body in bodies if body.start not in asking)
    else:
        start = entered.first | entered.exported | _mains(elf, text, decoder)
        required = _reached(text, decoder, start, free, by_name)
    return HostCode(
        functions=_functions(carriers, named),
        required=required,
        chosen=flags - required - _union(free.values()),
        signs=(*signs, *([NAMES] if by_name else [])),
        whole=text.known,
    )


@cache
def _decoder(machine: int) -> Decoder | None:
    """Return the decoder for a machine; None where its library is left out, as on nodes."""
    if machine == AARCH64:
        return Arm()
    try:
        from imagematrix.audit.cpu.x86 import X86  # it loads a large library
    except ModuleNotFoundError:
        return None
    return X86()


def _carriers(text: Text, decoder: Decoder) -> tuple[dict[int, frozenset[str]], set[int]]:
    """Return the flags of each function that has any, by address, and the functions that ask for the CPU."""
    found: dict[int, frozenset[str]] = {}
    asking: set[int] = set()
    sets: dict[frozenset[str], frozenset[str]] = {}  # there are few, and many functions
    for body in text.bodies():
        raw = text.read(body)
        codes = decoder.codes(raw)
        if decoder.asks(codes):
            asking.add(body.start)
        flags = decoder.flags(codes)
        if flags and not (body.bounded and decoder.sound(codes)):  # some of it may be data
            flags = frozenset(flag for flag, count in decoder.counted(raw).items() if count >= FEW)
        if flags:
            found[body.start] = sets.setdefault(flags, flags)
    return found, asking


def _mains(elf: Elf, text: Text, decoder: Decoder) -> set[int]:
    """Return the functions whose addresses the first one takes: main, without a symbol."""
    first = text.body(elf.entry)
    return set(decoder.taken(text.read(first), first.start)) if first else set()


def _reached(
    text: Text,
    decoder: Decoder,
    start: Iterable[int],
    free: Mapping[int, frozenset[str]],
    by_name: set[int],
) -> frozenset[str]:
    """Return the flags of the functions that are called from those at `start`, and not `by_name`."""
    all_flags = _union(free.values())
    found: set[str] = set()
    seen: set[int] = set()
    waiting = sorted(start)
    while waiting and found < all_flags:
        body = text.body(waiting.pop())
        if body is None or not body.bounded or body.start in seen or body.start in by_name:
            continue
        seen.add(body.start)
        found |= free.get(body.start, frozenset())
        waiting += decoder.targets(text.read(body), body.start)
        if body.goes_on:
            waiting.append(body.start + body.size)
    return frozenset(found)


def _named(elf: Elf, window: Window, wanted: Iterable[int]) -> dict[int, set[str]]:
    """Return the names of functions by their addresses, for those that have any."""
    wanted = set(wanted)
    places: dict[int, int] = {}
    for one in functions.symbols(elf, window):
        if one.address in wanted and one.section != functions.UNDEFINED:
            places[one.place] = one.address
    found: dict[int, set[str]] = defaultdict(set)
    for address, name in zip(places.values(), functions.names(places, window), strict=True):
        found[address].add(name)
    return found


def _functions(carriers: Mapping[int, frozenset[str]], named: Mapping[int, set[str]]) -> dict[str, Carriers]:
    by_flag: dict[str, list[int]] = defaultdict(list)
    for start, flags in carriers.items():
        for flag in flags:
            by_flag[flag].append(start)
    return {
        flag: Carriers(
            count=len(starts),
            names=tuple(sorted({min(named[one]) for one in starts if named.get(one)})[:NAMED]),
        )
        for flag, starts in sorted(by_flag.items())
    }


def _union(sets: Iterable[Iterable[str]]) -> frozenset[str]:
    return frozenset().union(*sets)
