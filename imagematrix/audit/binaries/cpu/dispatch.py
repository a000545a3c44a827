"""Evidence that a program chooses code for the CPU when it runs: names, symbols, strings."""

from __future__ import annotations

import posixpath
import re

from imagematrix.audit.binaries.cpu import functions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.audit.binaries.elf import Elf
    from imagematrix.audit.binaries.window import Window

# Names of CPUs, of their instruction sets and registers, as in foo.avx2, foo_HASWELL, N_AVX512_SKX,
# libggml-cpu-haswell.so.
FLAVOUR = re.compile(
    r"(?<![a-z])(?:__aarch64_(?:cas|swp|ld)|avx|amx|asimd|armv[89]|cortex|neoverse|thunderx|v?pclmul"
    r"|(?:sse[34](?:[._]?[12a])?|ssse3|f16c|fma[34]|bmi[12]?|popcnt|lzcnt|movbe|aes_?ni|sha_?ni|vaes|gfni|vnni"
    r"|xop|[yz]mm|evex|xsavec?|neon|sve\d*|dotprod|i8mm|lse|haswell|broadwell|skylakex?|skx|icelake|icl|cascadelake"
    r"|cooperlake|sapphirerapids|spr|alderlake|znver\d|zen\d?|sandybridge|ivybridge|nehalem|westmere|penryn"
    r"|prescott|dunnington|knl|knm|barcelona|bulldozer|piledriver|steamroller|excavator|x86[-_]64[-_]v[234]"
    r"|a64fx|tsv110)(?![a-z]))",
    re.IGNORECASE | re.ASCII,
)
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


def is_cpu_specific_name(name: str) -> bool:
    """Whether a function's name says that it is for certain CPUs."""
    return FLAVOUR.search(name) is not None


def is_cpu_specific_file(path: str) -> bool:
    """Whether a file's path says that it is loaded only on certain CPUs."""
    folder, name = posixpath.split(path)
    return HWCAPS in folder.split("/") or is_cpu_specific_name(name)


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
