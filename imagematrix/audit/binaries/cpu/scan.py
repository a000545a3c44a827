"""Decoding the code of a file: the CPU flags that its functions need, and those that are always required.

If nothing in the file detects the CPU, a flag is required if calls and jumps lead from an entry point to code
that needs it. Otherwise, only code that always runs counts: main and the constructors themselves, unless they
detect the CPU. A function that is named for certain CPUs counts as chosen by the CPU. What Go states that it
compiled a program for is required, too.

For the rest of the code, the share of functions for newer CPUs tells: a compiler that may use AVX uses no
instruction of SSE any more. In official wheels, at least 87 of 100 functions with vectors use AVX if the
whole library is compiled for it, and at most 67 if the library chooses functions by the CPU.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from functools import cache, partial

from imagematrix.audit.binaries.cpu import dispatch, functions, go_build, start_code
from imagematrix.audit.binaries.cpu.arm import Arm
from imagematrix.audit.binaries.cpu.functions import Text
from imagematrix.audit.binaries.elf import AARCH64, CODE, X86_64
from imagematrix.audit.binaries.host_code import NAMES, Carriers, HostCode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from imagematrix.audit.binaries.cpu.decoder import Decoder
    from imagematrix.audit.binaries.elf import Elf, Section
    from imagematrix.audit.binaries.window import Window

    # Starts to scan a file, and returns a function that waits for the result; see `scan_file`.
    StartScan = Callable[[str, Elf, Window], Callable[[], HostCode]]

FEWEST = 20  # functions for which a compiler had the choice; fewer are no evidence
NEARLY_ALL = 0.8  # of these functions
LARGER_PART = 0.5
WIDE_REGISTERS = ("avx512", "amx")  # how flags for them begin
# Of the functions for newer CPUs, the share that shows that the file is compiled for another flag, too. It is
# at least 0.09 for AVX2, but below 0.01 where a few functions are chosen by the CPU.
SHOWN = 0.05
FEW = 8  # instructions with a flag in bytes that may be data; fewer are no evidence
NAMED = 5  # names of functions to report for each flag
LINKAGE = ".plt"  # beginning of the names of sections with calls to other files
WIDE = b"\x02\x01"  # 64 bits, little end first
MACHINES = (X86_64, AARCH64)


def is_decodable(elf: Elf, window: Window) -> bool:
    """Whether a file is a program or a library with code that can be decoded."""
    return elf.linked and elf.machine in MACHINES and window.read_at(4, len(WIDE)) == WIDE


def list_code_sections(elf: Elf) -> list[Section]:
    """Return the sections of a file with code to decode."""
    return [
        section for section in elf.sections if section.flags & CODE and not section.name.startswith(LINKAGE)
    ]


def scan_later(path: str, elf: Elf, window: Window) -> Callable[[], HostCode]:
    """Return a function that returns the result of `scan_file`."""
    return partial(scan_file, path, elf, window)


def scan_file(path: str, elf: Elf, window: Window) -> HostCode:
    """Return the CPU flags that a decodable file's code needs; `whole` is False without a decoder."""
    sections = list_code_sections(elf)
    go_flags = go_build.find_go_flags(elf, window)
    decoder = _get_decoder(elf.machine) if sections else None
    if decoder is None:
        return HostCode(required=go_flags, whole=False)
    text = Text(elf, window, sections)
    carriers, detecting, older = _find_carriers(text, decoder)
    flags = _union(carriers.values())
    if not flags:
        return HostCode(required=go_flags, whole=text.has_functions)
    counts = Counter(flag for needed in carriers.values() for flag in needed)
    names, by_name = _find_names(elf, window, carriers)
    library_names = () if elf.program else (path, elf.soname or "")
    if any(dispatch.is_cpu_specific_file(name, elf.machine) for name in library_names):
        by_name = set(carriers)
    for start in by_name:
        del carriers[start]  # the rest is free: no name says that it is chosen by the CPU
    free = _union(carriers.values())
    signs = (["cpuid"] if detecting else []) + sorted(set(dispatch.find_dispatch_signs(elf, window)))
    first = functions.list_always_run(elf, window)
    first |= start_code.find_started(elf, window, text, decoder)
    if signs:
        bodies = [body for address in first if (body := text.find_body(address)) and body.bounded]
        required = _union(carriers.get(body.start, ()) for body in bodies if body.start not in detecting)
    else:
        first.update(functions.list_exported(elf, window))
        required = _find_reachable_flags(text, decoder, first, carriers, by_name)
    required |= go_flags
    probable, partial = _find_compiled_flags(carriers, older, decoder.newer_flags)
    return HostCode(
        functions={
            flag: Carriers(count=count, names=tuple(names[flag])) for flag, count in sorted(counts.items())
        },
        required=required,
        probable=probable - required,
        partial=partial - required,
        chosen=flags - required - free,
        signs=(*signs, *([NAMES] if by_name else [])),
        whole=text.has_functions,
    )


@cache
def _get_decoder(machine: int) -> Decoder | None:
    """Return the decoder for a machine, or None if its library is missing, as in the zipapp for nodes."""
    if machine == AARCH64:
        return Arm()
    try:
        from imagematrix.audit.binaries.cpu.x86 import X86  # imported late: it loads a large library
    except ModuleNotFoundError:
        return None
    return X86()


def _find_carriers(text: Text, decoder: Decoder) -> tuple[dict[int, frozenset[str]], set[int], int]:
    """Return the flags of the functions that need any, by address, and the functions that detect the CPU.

    Also return the number of functions with older instructions; see Decoder.
    """
    flags_by_start: dict[int, frozenset[str]] = {}
    detecting: set[int] = set()
    older = 0
    sets: dict[frozenset[str], frozenset[str]] = {}  # many functions share few different sets
    for body in text.list_bodies():
        raw = text.read_body(body)
        codes = decoder.list_codes(raw)
        if decoder.detects_cpu(codes):
            detecting.add(body.start)
        flags = decoder.find_flags(codes)
        certain = body.bounded and decoder.has_only_instructions(codes)  # otherwise some of it may be data
        older += certain and decoder.has_older(codes)
        if flags and not certain:
            flags = frozenset(flag for flag, count in decoder.count_by_flag(raw).items() if count >= FEW)
        if flags:
            flags_by_start[body.start] = sets.setdefault(flags, flags)
    return flags_by_start, detecting, older


def _find_compiled_flags(
    carriers: Mapping[int, frozenset[str]], older: int, newer: frozenset[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the flags for which nearly all code is compiled, and those for which only much of it is."""
    for_newer = [flags for flags in carriers.values() if not newer.isdisjoint(flags)]
    choices = len(for_newer) + older
    if choices < FEWEST:
        return frozenset(), frozenset()
    counts = Counter(flag for flags in for_newer for flag in flags)
    if len(for_newer) >= NEARLY_ALL * choices:
        least = SHOWN * len(for_newer)
        shown = frozenset(flag for flag, count in counts.items() if count >= least)
        # Functions for wide registers stand beside those for AVX2 also where a library chooses by the CPU: a
        # third of the functions of bitsandbytes 0.50.2, which runs without AVX-512. Only more than that shows
        # that all is compiled for them.
        wide = frozenset(
            flag
            for flag in shown
            if flag.startswith(WIDE_REGISTERS) and counts[flag] <= LARGER_PART * choices
        )
        return shown - wide, wide
    return frozenset(), frozenset(flag for flag, count in counts.items() if count > LARGER_PART * choices)


def _find_reachable_flags(
    text: Text,
    decoder: Decoder,
    start: Iterable[int],
    free: Mapping[int, frozenset[str]],
    by_name: set[int],
) -> frozenset[str]:
    """Return the flags of the functions that are reached from `start`, without those in `by_name`."""
    all_flags = _union(free.values())
    flags: set[str] = set()
    seen: set[int] = set()
    waiting = sorted(start)
    while waiting and flags < all_flags:
        body = text.find_body(waiting.pop())
        if body is None or not body.bounded or body.start in seen or body.start in by_name:
            continue
        seen.add(body.start)
        flags |= free.get(body.start, frozenset())
        waiting += decoder.list_targets(text.read_body(body), body.start)
        if body.continued:
            waiting.append(body.start + body.size)
    return frozenset(flags)


def _find_names(
    elf: Elf, window: Window, carriers: Mapping[int, frozenset[str]]
) -> tuple[Mapping[str, list[str]], set[int]]:
    """Return the first names of functions with each flag, and the functions that are named for certain CPUs.

    There may be hundreds of thousands of functions, so no other names are kept.
    """
    names: dict[str, list[str]] = defaultdict(list)
    by_name: set[int] = set()
    for symbol in functions.list_symbols(elf, window):
        if symbol.section == functions.UNDEFINED or symbol.address not in carriers:
            continue
        (name,) = functions.list_names([symbol.name], window)
        if dispatch.is_cpu_specific_name(name, elf.machine):
            by_name.add(symbol.address)
        for flag in carriers[symbol.address]:
            examples = names[flag]
            if (len(examples) < NAMED or name < examples[-1]) and name not in examples:
                insort(examples, name)
                del examples[NAMED:]
    return names, by_name


def _union(sets: Iterable[Iterable[str]]) -> frozenset[str]:
    return frozenset().union(*sets)
