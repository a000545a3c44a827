"""Instructions of AArch64, and the flags of /proc/cpuinfo that they need.

Every instruction is a word of 32 bits, so a table of masks is enough to decode them (capstone 5 names the
features of only a few). The encodings come from the Arm Architecture Reference Manual (DDI 0487), chapter C4.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from functools import cached_property

from imagematrix.audit.binaries.cpu.decoder import Call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WORD, POINTER = 4, 8  # bytes
# Mask, value and flag; the first row that matches a word decides. Hints (branch targets, and some of pointer
# authentication) run on every CPU.
TABLE = (
    # Pointer authentication: returns and branches, keys of pointers and of data, loads
    (0xFE1FF800, 0xD61F0800, "paca"),
    (0xFFFF8000, 0xDAC10000, "paca"),
    (0xFFE0FC00, 0x9AC03000, "pacg"),
    (0xFF200400, 0xF8200400, "paca"),
    # Loads and stores: compare and swap, atomic operations, release consistency, memory copying
    (0x3FA07C00, 0x08A07C00, "atomics"),
    (0xBFA07C00, 0x08207C00, "atomics"),
    (0x3FFFFC00, 0x38BFC000, "lrcpc"),
    (0x3F208C00, 0x38200000, "atomics"),
    (0x3F20FC00, 0x38208000, "atomics"),
    (0x3F200C00, 0x19000000, "ilrcpc"),
    (0x3B200C00, 0x19000400, "mops"),
    # Integers: checksums, common short sequences
    (0x7FE0E000, 0x1AC04000, "crc32"),
    (0x7FE0F000, 0x1AC06000, "cssc"),
    (0x7FFFFC00, 0x5AC02000, "cssc"),
    (0x7FFFFC00, 0x5AC01800, "cssc"),
    (0x7FFFFC00, 0x5AC01C00, "cssc"),
    (0x7FF00000, 0x11C00000, "cssc"),
    # Cryptography
    (0xFFFFCC00, 0x4E284800, "aes"),
    (0xBFE0FC00, 0x0EE0E000, "pmull"),
    (0xFFE0CC00, 0x5E000000, "sha1"),
    (0xFFE0CC00, 0x5E004000, "sha2"),
    (0xFFFFEC00, 0x5E280800, "sha1"),
    (0xFFFFFC00, 0x5E282800, "sha2"),
    (0xFFE0FC00, 0xCE608C00, "sha3"),
    (0xFFE0F000, 0xCE608000, "sha512"),
    (0xFFFFFC00, 0xCEC08000, "sha512"),
    (0xFFC08000, 0xCE000000, "sha3"),
    (0xFFE00000, 0xCE800000, "sha3"),
    (0xFFE08000, 0xCE400000, "sm3"),
    (0xFFE0C000, 0xCE408000, "sm3"),
    (0xFFE0F800, 0xCE60C000, "sm3"),
    (0xFFFFFC00, 0xCEC08400, "sm4"),
    (0xFFE0FC00, 0xCE60C800, "sm4"),
    # Vectors: dot products, matrices, bfloat16, complex numbers, rounding multiplications
    (0x9FE0FC00, 0x0E809400, "asimddp"),
    (0x9FC0F400, 0x0F80E000, "asimddp"),
    (0xBFE0FC00, 0x0E809C00, "i8mm"),
    (0xDFE0FC00, 0x4E80A400, "i8mm"),
    (0xFFE0FC00, 0x4E80AC00, "i8mm"),
    (0xBF40F400, 0x0F00F000, "i8mm"),
    (0xBF40F400, 0x0F40F000, "bf16"),
    (0xBF60FC00, 0x2E40FC00, "bf16"),
    (0xFFE0FC00, 0x6E40EC00, "bf16"),
    (0xFFFFFC00, 0x1E634000, "bf16"),
    (0xBFFFFC00, 0x0EA16800, "bf16"),
    (0xBF20E400, 0x2E00C400, "fcma"),
    (0xBF20EC00, 0x2E00E400, "fcma"),
    (0xBF409400, 0x2F401000, "fcma"),
    (0xBFC09400, 0x2F801000, "fcma"),
    (0xBF20F400, 0x2E008400, "asimdrdm"),
    (0xFF20F400, 0x7E008400, "asimdrdm"),
    (0xBF00D400, 0x2F00D000, "asimdrdm"),
    (0xFF00D400, 0x7F00D000, "asimdrdm"),
    (0xBF60FC00, 0x0E20EC00, "asimdfhm"),
    (0xBF60FC00, 0x2E20CC00, "asimdfhm"),
    (0xBFC0B400, 0x0F800000, "asimdfhm"),
    (0xBFC0B400, 0x2F808000, "asimdfhm"),
    # Floating point: greatest and least magnitude, rounding, JavaScript's conversion, half precision except
    # for its conversions
    (0x9FA0FC00, 0x0EA0DC00, "faminmax"),
    (0x9FE0FC00, 0x0EC01C00, "faminmax"),
    (0xFF3EE000, 0x650E8000, "faminmax"),
    (0xFFBE7C00, 0x1E284000, "frint"),
    (0x9FBFEC00, 0x0E21E800, "frint"),
    (0xFFFFFC00, 0x1E7E0000, "jscvt"),
    (0xFFFE7C00, 0x1EE24000, ""),
    (0x7FC00000, 0x1EC00000, "fphp"),
    (0xFFC00000, 0x1FC00000, "fphp"),
    (0x9F60C400, 0x0E400400, "asimdhp"),
    (0x9F7E0C00, 0x0E780800, "asimdhp"),
    (0xBF7FFC00, 0x0E30C800, "asimdhp"),
    (0xBF7FFC00, 0x0E30F800, "asimdhp"),
    (0xBFC0B400, 0x0F001000, "asimdhp"),
    (0x9FC0F400, 0x0F009000, "asimdhp"),
    (0xBFF8FC00, 0x0F00FC00, "asimdhp"),
    (0x9FF0FC00, 0x0F10E400, "asimdhp"),
    (0x9FF0FC00, 0x0F10FC00, "asimdhp"),
    (0xFF7FCC00, 0x5E30C800, "fphp"),
    (0xFFC0B400, 0x5F001000, "fphp"),
    (0xDFC0F400, 0x5F009000, "fphp"),
    (0xDFF0FC00, 0x5F10E400, "fphp"),
    (0xDFF0FC00, 0x5F10FC00, "fphp"),
    (0xDF60C400, 0x5E400400, "fphp"),
    (0xDF7E0C00, 0x5E780800, "fphp"),
    # Scalable vectors: their length in streaming mode, extensions of their own, what the second version
    # added, and all others
    (0xFFA0F800, 0x04205800, "sme"),
    (0xFFFFF800, 0x04BF5800, "sme"),
    (0xFFE0FC00, 0x6460E400, "svebf16"),
    (0xFFE0FC00, 0x64608000, "svebf16"),
    (0xFFE0FC00, 0x64604000, "svebf16"),
    (0xFFE0F800, 0x64E08000, "svebf16"),
    (0xFFE0F000, 0x64E04000, "svebf16"),
    (0xFEFFE000, 0x648AA000, "svebf16"),
    (0xFFE0FC00, 0x64A0E400, "svef32mm"),
    (0xFFE0FC00, 0x64E0E400, "svef64mm"),
    (0xFFE0E000, 0x05A00000, "svef64mm"),
    (0xFE60C000, 0xA4200000, "svef64mm"),
    (0xFFFFF800, 0x4520E000, "sveaes"),
    (0xFFFFF800, 0x4522E000, "sveaes"),
    (0xFFE0F800, 0x45006800, "svepmull"),
    (0xFFFFFC00, 0x4523E000, "svesm4"),
    (0xFFE0FC00, 0x4520F000, "svesm4"),
    (0xFFE0FC00, 0x4520F400, "svesha3"),
    (0xFF20F000, 0x4500B000, "svebitperm"),
    (0xFF20F800, 0x44000000, "sve"),
    (0xFFA0F800, 0x44A00000, "sve"),
    (0xFF20FC00, 0x45009800, "svei8mm"),
    (0xFFE0FC00, 0x44807800, "svei8mm"),
    (0xFFE0F800, 0x44A01800, "svei8mm"),
    (0xFE000000, 0x44000000, "sve2"),
    (0xFF20F800, 0x04203800, "sve2"),
    (0xFF20FC00, 0x04203400, "sve2"),
    (0xFF20E000, 0x04206000, "sve2"),
    (0xFF3EE000, 0x04068000, "sve2"),
    (0xFF3EE000, 0x040C8000, "sve2"),
    (0xFF3FE000, 0x040F8000, "sve2"),
    (0xFFE0E000, 0x05600000, "sve2"),
    (0xFF3FE000, 0x052D8000, "sve2"),
    (0xFF20F800, 0x05202800, "sve2"),
    (0xFF20E400, 0x25200000, "sve2"),
    (0xFF20FC00, 0x25203000, "sve2"),
    (0xFF38E000, 0x64108000, "sve2"),
    (0xFFE0D800, 0x64A08000, "sve2"),
    (0xFFE0D000, 0x64A04000, "sve2"),
    (0xFF3CE000, 0x6408A000, "sve2"),
    (0xFFF9E000, 0x6518A000, "sve2"),
    (0xFFFFE000, 0x650AA000, "sve2"),
    (0xFE60C000, 0x84008000, "sve2"),
    (0xFE60A000, 0xC4008000, "sve2"),
    (0xFE20E000, 0xE4002000, "sve2"),
    (0x1E000000, 0x04000000, "sve"),
    (0x9E000000, 0x80000000, "sme"),
)
# Exclusive loads and stores, in whose place compilers use atomic instructions, if they may.
EXCLUSIVE = (0x3FA00000, 0x08000000)
EXCLUSIVE_BYTES = frozenset([0x08, 0x48, 0x88, 0xC8])  # the highest bytes of these words
ID_REGISTERS = (0xFFFFF000, 0xD5380000)  # mrs of registers that describe the CPU, which the kernel emulates
BRANCH = (0x7C000000, 0x14000000)  # b and bl, with 26 bits of distance
NEAR = ((0xFF000000, 0x54000000, 19), (0x7E000000, 0x34000000, 19), (0x7E000000, 0x36000000, 14))
PAGE = (0x9F000000, 0x90000000)  # adrp
NEAR_PLACE = (0x9F000000, 0x10000000)  # adr, in whose place linkers use both, and the reverse
PLACE = (0xFFC00000, 0x91000000)  # add of 12 bits
LOAD = (0xFFC00000, 0xF9400000)  # ldr of 8 bytes, with 12 bits of distance
MOVE, KEEP = (0xFF800000, 0xD2800000), (0xFF800000, 0xF2800000)  # movz and movk, with 16 bits each


class Arm:
    """The decoder for AArch64. An instruction's code is its word."""

    newer_flags = frozenset(["atomics"])

    def list_codes(self, body: bytes) -> frozenset[int]:
        """Return the instructions in a function."""
        return frozenset(_unpack_words(body))

    def has_only_instructions(self, codes: frozenset[int]) -> bool:  # noqa: ARG002 - the protocol's signature
        """Return True: on AArch64, data cannot be told from instructions."""
        return True

    def detects_cpu(self, codes: frozenset[int]) -> bool:
        """Whether a function detects the CPU."""
        return any(code & ID_REGISTERS[0] == ID_REGISTERS[1] for code in codes)

    def find_flags(self, codes: frozenset[int]) -> frozenset[str]:
        """Return the flags beyond the baseline that instructions need."""
        rows = self._rows
        return frozenset(self._find_flag(code) for code in codes if code >> 24 in rows) - {""}

    def has_older(self, codes: frozenset[int]) -> bool:
        """Whether a function has instructions in whose place compilers for newer CPUs use others."""
        mask, value = EXCLUSIVE
        return any(code >> 24 in EXCLUSIVE_BYTES and code & mask == value for code in codes)

    def count_by_flag(self, body: bytes) -> Counter[str]:
        """Return how many instructions need each flag."""
        return Counter(flag for code in _unpack_words(body) if (flag := self._find_flag(code)))

    def list_targets(self, body: bytes, address: int) -> Iterator[int]:
        """Yield the addresses that a function at `address` calls or jumps to."""
        for here, code in _list_words(body, address):
            if code & BRANCH[0] == BRANCH[1]:
                yield here + _sign_extend(code, 26) * WORD
            else:
                for mask, value, bits in NEAR:
                    if code & mask == value:
                        yield here + _sign_extend(code >> 5, bits) * WORD

    def list_calls(self, body: bytes, address: int) -> Iterator[Call]:
        """Yield the calls and jumps of a function at `address`, and its end."""
        registers: dict[int, int] = {}  # addresses that take several instructions
        pages: dict[int, int] = {}
        addresses: set[int] = set()
        slots: set[int] = set()
        for here, code in _list_words(body, address):
            target, source = code & 31, code >> 5 & 31
            distance = _sign_extend((code >> 5) << 2 | code >> 29 & 3, 21)
            twelve, sixteen, shift = code >> 10 & 0xFFF, code >> 5 & 0xFFFF, (code >> 21 & 3) * 16
            if code & NEAR_PLACE[0] == NEAR_PLACE[1]:
                addresses.add(here + distance)
            elif code & PAGE[0] == PAGE[1]:
                pages[target] = (here & ~0xFFF) + (distance << 12)
            elif code & PLACE[0] == PLACE[1] and source in pages:
                addresses.add(pages[source] + twelve)
            elif code & LOAD[0] == LOAD[1] and source in pages:
                slots.add(pages[source] + twelve * POINTER)
            elif code & MOVE[0] == MOVE[1]:
                registers[target] = sixteen << shift
            elif code & KEEP[0] == KEEP[1]:
                registers[target] = registers.get(target, 0) & ~(0xFFFF << shift) | sixteen << shift
            elif code & BRANCH[0] == BRANCH[1]:
                called = here + _sign_extend(code, 26) * WORD
                yield Call(called, frozenset([*addresses, *registers.values()]), frozenset(slots))
                registers, addresses, slots = {}, set(), set()
        yield Call(0, frozenset([*addresses, *registers.values()]), frozenset(slots))

    def _find_flag(self, code: int) -> str:
        rows = self._rows.get(code >> 24, ())
        return next((flag for mask, value, flag in rows if code & mask == value), "")

    @cached_property
    def _rows(self) -> Mapping[int, tuple[tuple[int, int, str], ...]]:
        """The rows of the table by the highest byte of the words that they match."""
        rows: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        for mask, value, flag in TABLE:
            for first in range(256):
                if first & mask >> 24 == value >> 24:
                    rows[first].append((mask, value, flag))
        return {first: tuple(matching) for first, matching in rows.items()}


def _list_words(body: bytes, address: int) -> Iterator[tuple[int, int]]:
    return ((address + index * WORD, code) for index, code in enumerate(_unpack_words(body)))


def _unpack_words(body: bytes) -> tuple[int, ...]:
    count = len(body) // WORD
    return struct.unpack(f"<{count}I", body[: count * WORD])


def _sign_extend(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value
