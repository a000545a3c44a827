"""Evidence that a program chooses code for the CPU when it runs: names, symbols, strings."""

from __future__ import annotations

import posixpath
import re

from imagematrix.audit.binaries.cpu import functions
from imagematrix.audit.binaries.elf import AARCH64, X86_64

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.audit.binaries.elf import Elf
    from imagematrix.audit.binaries.window import Window

# Names of CPUs, of their instruction sets and registers, by machine, as in foo.avx2, foo_HASWELL,
# N_AVX512_SKX, libggml-cpu-haswell.so.
WORDS = {
    X86_64: r"avx(?:ifma|ne(?:convert)?|only|vnni(?:int(?:8|16))?)?|v?pclmul(?:q?dq)?"
    r"|amx(?:avx512|bf16|complex|fp(?:8|16)|int8|movrs|tf32|tile|transpose)?"
    r"|3dnow(?:ext)?|sse[34](?:[._]?[12a])?|ssse3|f16c|fma[34]|bmi[12]|movbe|aes_?ni|sha_?ni|vaes|gfni|vnni|[yz]mm|evex|xsavec?"
    r"|haswell|broadwell|skylakex?|icelake|cascadelake|cooperlake|sapphirerapids|alderlake|znver\d|zen\d"
    r"|sandybridge|ivybridge|nehalem|westmere|penryn|prescott|dunnington|opteron|barcelona|bulldozer|piledriver"
    r"|steamroller|excavator|x86[-_]64[-_]v[234]",
    AARCH64: r"__aarch64_(?:cas|swp|ld)[a-z]*|asimd(?:dp|fhm|hp|rdm)?|armv[89][a-z]*|cortex[-_]?[amrx]\d"
    r"|neoverse(?:[-_]?[env]\d)?|thunderx|sve\d+|i8mm|a64fx|tsv110",
}
# Those that also mean something else, such as the logarithm of a sum of exponentials.
AMBIGUOUS = {X86_64: "bmi|icl|knl|knm|lzcnt|popcnt|skx|spr|xop|zen", AARCH64: "dotprod|lse|neon|sve"}
FLAVOUR = re.compile(
    rf"(?<![a-z])(?:{'|'.join([*WORDS.values(), *AMBIGUOUS.values()])})(?![a-z])", re.IGNORECASE | re.ASCII
)
# In names of functions and libraries, an ambiguous word counts in capitals, and at the end of a longer name.
OF_MACHINE = {
    machine: re.compile(
        rf"(?<![a-z])(?:{words}|(?-i:{AMBIGUOUS[machine].upper()})"
        rf"|(?<=[^a-z])(?:{AMBIGUOUS[machine]})(?=\d*(?:\W|$)))(?![a-z])",
        re.IGNORECASE | re.ASCII,
    )
    for machine, words in WORDS.items()
}
MANGLED = ("_Z", "_R")  # how names of C++ and Rust begin, with the length before each identifier
LENGTH = re.compile(r"\d{1,9}", re.ASCII)
# Functions and variables that describe the CPU, in the C library, compilers' runtimes and other libraries.
DETECTION = re.compile(
    r"cpu.?(?:id|model|indicator|features?|flags?|info|supports|detect|arch|caps?|capab\w+|isa|level|type|has)"
    r"|auxval|hwcap|ia32cap|armcap|x86_get|simd|has_?(?:avx|sse|neon|sve|fma)|have_?(?:avx|sse|neon|sve|fma|lse)"
    r"|hardware_?support",
    re.IGNORECASE | re.ASCII,
)
TEXTS = (b"/proc/cpuinfo", b"/proc/self/auxv")
RELA = 24  # bytes of a relocation
# R_X86_64_IRELATIVE and R_AARCH64_IRELATIVE: the loader calls a function that returns the address.
INDIRECT = frozenset([37, 1032])
HWCAPS = "glibc-hwcaps"
PIECE = 1 << 20
SEARCHED = 64 << 20  # bytes
MOST_RELOCATIONS = 2_000_000


def has_cpu_word(name: str) -> bool:
    """Whether a part of a path has the name of a CPU or an instruction set in it."""
    return FLAVOUR.search(name) is not None


def is_cpu_specific_name(name: str, machine: int) -> bool:
    """Whether a function's name says that it is for certain CPUs of this machine of ELF."""
    search = OF_MACHINE[machine].search
    return search(name) is not None or any(search(word, 1) for word in _list_identifiers(name))


def is_cpu_specific_file(path: str, machine: int) -> bool:
    """Whether a library's path says that it is loaded only on certain CPUs."""
    folder, name = posixpath.split(path)
    return HWCAPS in folder.split("/") or is_cpu_specific_name(name, machine)


def _list_identifiers(name: str) -> Iterator[str]:
    """Yield the identifiers in a mangled name."""
    at = 0
    while name.startswith(MANGLED) and (length := LENGTH.search(name, at)):
        at = length.end() + int(length[0])
        yield name[length.end() : at]


def find_dispatch_signs(elf: Elf, window: Window) -> Iterator[str]:
    """Yield the evidence that a file detects the CPU, apart from its instructions."""
    imported: list[int] = []
    has_ifunc = False
    for symbol in functions.list_symbols(elf, window):
        has_ifunc |= symbol.kind == functions.IFUNC
        if symbol.dynamic and symbol.section == functions.UNDEFINED:
            imported.append(symbol.name)
    if has_ifunc or _has_indirect_relocation(elf, window):
        yield "ifunc"
    yield from sorted({name for name in functions.list_names(imported, window) if DETECTION.search(name)})
    for section in elf.find_sections(".rodata"):
        for at in range(0, min(section.size, SEARCHED), PIECE):
            raw = window.read_at(section.offset + at, min(PIECE + len(TEXTS[0]), section.size - at))
            yield from (text.decode() for text in TEXTS if text in raw)


def _has_indirect_relocation(elf: Elf, window: Window) -> bool:
    for section in elf.find_sections(".rela.plt", ".rela.dyn", ".rela.iplt"):
        step = PIECE // RELA * RELA
        for at in range(0, min(section.size, MOST_RELOCATIONS * RELA), step):
            raw = window.read_at(section.offset + at, min(step, section.size - at))
            kinds = {raw[offset : offset + 4] for offset in range(8, len(raw), RELA)}
            if any(int.from_bytes(kind, "little") in INDIRECT for kind in kinds):
                return True
    return False
