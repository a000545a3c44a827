"""Decoding the code of a file: which flags its functions need, and which of them it can't run without.

A flag is required where code with it is reached from where the file is entered, by calls and jumps, and
nothing in the file can tell one CPU from another. Where something can, that holds for what runs first and
does not ask: main and the constructors themselves. A function whose name says which CPU it is for counts as
chosen by the CPU.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from functools import cache
from typing import Protocol

from imagematrix.audit.cpu import dispatch, functions, roots
from imagematrix.audit.cpu.arm import Arm
from imagematrix.audit.cpu.text import Text
from imagematrix.audit.elf import AARCH64, CODE, X86_64
from imagematrix.audit.host_code import NAMES, Carriers, HostCode

TYPE_CHECKING = False
if TYPE_CHECKING:
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
    counts = Counter(flag for own in carriers.values() for flag in own)
    names, by_name = _named(elf, window, carriers)
    if dispatch.chosen_file(path) or dispatch.chosen_file(elf.soname or ""):
        by_name = set(carriers)
    for start in by_name:
        del carriers[start]  # what is left is free: nothing says that the CPU chooses it
    free = _union(carriers.values())
    signs = (["cpuid"] if asking else []) + sorted(set(dispatch.signs(elf, window)))
    first = roots.first(elf, window) | _mains(elf, text, decoder)
    if signs:
        bodies = [body for address in first if (body := text.body(address)) and body.bounded]
        required = _union(carriers.get(body.start, ()) for body in bodies if body.start not in asking)
    else:
        first.update(roots.exported(elf, window))
        required = _reached(text, decoder, first, carriers, by_name)
    return HostCode(
        functions={
            flag: Carriers(count=count, names=tuple(names[flag])) for flag, count in sorted(counts.items())
        },
        required=required,
        chosen=flags - required - free,
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
    flags_by_start: dict[int, frozenset[str]] = {}
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
            flags_by_start[body.start] = sets.setdefault(flags, flags)
    return flags_by_start, asking


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
    flags: set[str] = set()
    seen: set[int] = set()
    waiting = sorted(start)
    while waiting and flags < all_flags:
        body = text.body(waiting.pop())
        if body is None or not body.bounded or body.start in seen or body.start in by_name:
            continue
        seen.add(body.start)
        flags |= free.get(body.start, frozenset())
        waiting += decoder.targets(text.read(body), body.start)
        if body.goes_on:
            waiting.append(body.start + body.size)
    return frozenset(flags)


def _named(
    elf: Elf, window: Window, carriers: Mapping[int, frozenset[str]]
) -> tuple[Mapping[str, list[str]], set[int]]:
    """Return the first names of functions with each flag, and the functions that are named for CPUs.

    There may be hundreds of thousands, so that no more than these names are kept.
    """
    first: dict[str, list[str]] = defaultdict(list)
    by_name: set[int] = set()
    for one in functions.symbols(elf, window):
        if one.section == functions.UNDEFINED or one.address not in carriers:
            continue
        (name,) = functions.names([one.place], window)
        if dispatch.chosen(name):
            by_name.add(one.address)
        for flag in carriers[one.address]:
            examples = first[flag]
            if (len(examples) < NAMED or name < examples[-1]) and name not in examples:
                insort(examples, name)
                del examples[NAMED:]
    return first, by_name


def _union(sets: Iterable[Iterable[str]]) -> frozenset[str]:
    return frozenset().union(*sets)
