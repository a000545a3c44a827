"""Instructions of x86-64, decoded by iced, and the flags of /proc/cpuinfo that they need."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import iced_x86
from iced_x86 import Code, CpuidFeature, FlowControl, Instruction

from imagematrix.audit.binaries.cpu.decoder import Call
from imagematrix.hardware.vendors import macros, marches

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ARCH = "x86_64"
BITS = 64
# iced's names of features whose names in Linux differ in more than case.
NAMES = {
    "AVX512_IFMA": "avx512ifma",
    "AVX512_VBMI": "avx512vbmi",
    "CMPXCHG16B": "cx16",
    "D3NOW": "3dnow",
    "D3NOWEXT": "3dnowext",
    "LZCNT": "abm",
    "SHA": "sha_ni",
    "SSE3": "pni",
}
# Compilers emit tzcnt for any CPU: older CPUs run it as bsf, which gives the same result where compilers use
# it. xgetbv only detects the CPU.
SSE = ("SSE", "SSSE")  # beginnings of iced's names of features
HARMLESS = ("TZCNT_", "XGETBV")
DETECTING = frozenset([Code.CPUID, Code.XGETBV])
BRANCHES = frozenset([FlowControl.CALL, FlowControl.UNCONDITIONAL_BRANCH, FlowControl.CONDITIONAL_BRANCH])
# iced 1.21 does not know APX. Its prefix REX2 stands in place of REX and the byte 0f; for some opcodes (their
# higher half) of both maps it is reserved. See Intel's APX specification (355828), chapter 3. Where bytes may
# be data, it is no evidence: much of what is random looks like it.
APX = -1  # in place of the code of an instruction with REX2
REX2 = b"\xd5"
RESERVED = ((0x4, 0x7, 0xA, 0xE), (0x3, 0x8))
PREFIXES = b"\x26\x2e\x36\x3e\x64\x65\x66\x67\xf0\xf2\xf3"
LONGEST = 15  # bytes of an instruction
ADDRESS_TAKING = frozenset([Code.LEA_R64_M, Code.MOV_RM64_IMM32])


class X86:
    """The decoder for x86-64. It collects codes in a set, which takes half the time of a loop over them."""

    newer_flags = frozenset(["avx", "avx512f"])

    def list_codes(self, body: bytes) -> frozenset[int]:
        """Return the kinds of instructions in a function."""
        codes = frozenset({instruction.code for instruction in iced_x86.Decoder(BITS, body)})
        return frozenset(_list_codes(body)) if Code.INVALID in codes else codes

    def has_only_instructions(self, codes: frozenset[int]) -> bool:
        """Whether a function contains nothing but instructions."""
        return Code.INVALID not in codes

    def detects_cpu(self, codes: frozenset[int]) -> bool:
        """Whether a function detects the CPU."""
        return not DETECTING.isdisjoint(codes)

    def find_flags(self, codes: frozenset[int]) -> frozenset[str]:
        """Return the flags beyond the baseline that instructions need."""
        table = self._table
        return frozenset().union(*(table[code] for code in codes & table.keys()))

    def has_older(self, codes: frozenset[int]) -> bool:
        """Whether a function has instructions in whose place compilers for newer CPUs use others."""
        return not codes.isdisjoint(self._sse_codes)

    def count_by_flag(self, body: bytes) -> Counter[str]:
        """Return how many instructions need each flag."""
        codes = Counter([instruction.code for instruction in iced_x86.Decoder(BITS, body)])
        counts: Counter[str] = Counter()
        for code in codes.keys() & self._table.keys():
            counts.update(dict.fromkeys(self._table[code], codes[code]))
        return counts

    def list_targets(self, body: bytes, address: int) -> Iterator[int]:
        """Yield the addresses that a function at `address` calls or jumps to."""
        for instruction in iced_x86.Decoder(BITS, body, ip=address):
            if instruction.flow_control in BRANCHES:
                yield instruction.near_branch_target

    def list_calls(self, body: bytes, address: int) -> Iterator[Call]:
        """Yield the calls and jumps of a function at `address`, and its end."""
        addresses: set[int] = set()
        slots: set[int] = set()
        for instruction in iced_x86.Decoder(BITS, body, ip=address):
            relative = instruction.is_ip_rel_memory_operand
            if instruction.code in ADDRESS_TAKING:
                addresses.add(instruction.ip_rel_memory_address if relative else instruction.immediate32)
            elif instruction.code == Code.MOV_R64_RM64 and relative:
                slots.add(instruction.ip_rel_memory_address)
            elif instruction.flow_control != FlowControl.NEXT:
                yield Call(instruction.near_branch_target, frozenset(addresses), frozenset(slots))
                addresses, slots = set(), set()
        yield Call(0, frozenset(addresses), frozenset(slots))

    @cached_property
    def _table(self) -> Mapping[int, frozenset[str]]:
        """The flags beyond the baseline that each code needs; codes without such flags are left out."""
        flags = frozenset(macros.FLAGS[ARCH].values()) - dict(marches.LEVELS)["x86-64-v1"]
        features = {value: NAMES.get(name, name.lower()) for name, value in _list_constants(CpuidFeature)}
        table = {APX: frozenset(["apx"])}
        instruction = Instruction()
        for name, code in _list_constants(Code):
            instruction.code = code  # type: ignore[assignment]  # its constants are numbers
            needed = flags.intersection(features[feature] for feature in instruction.cpuid_features())
            if needed - marches.IGNORED[ARCH] and not name.startswith(HARMLESS):
                table[code] = needed - marches.IGNORED[ARCH]
        return table

    @cached_property
    def _sse_codes(self) -> frozenset[int]:
        """The codes of SSE that AVX has, too: compilers for CPUs with AVX only use the latter's (VADDSD)."""
        sse = {value for name, value in _list_constants(CpuidFeature) if name.startswith(SSE)}
        names = [name.split("_") for name, _ in _list_constants(Code)]
        mnemonics_of_avx = {words[1] for words in names if words[0] == "VEX"}
        codes: set[int] = set()
        instruction = Instruction()
        for name, code in _list_constants(Code):
            instruction.code = code  # type: ignore[assignment]  # its constants are numbers
            in_avx = f"V{name.split('_')[0]}" in mnemonics_of_avx
            if in_avx and not sse.isdisjoint(instruction.cpuid_features()):
                codes.add(code)
        return frozenset(codes)


def _list_codes(body: bytes) -> Iterator[int]:
    """Yield the code of each instruction, `APX` for those with REX2."""
    decoder = iced_x86.Decoder(BITS, body)
    while decoder.can_decode:
        at = decoder.position
        code = decoder.decode().code
        size = _measure_rex2(body[at : at + LONGEST]) if code == Code.INVALID else 0
        if size:
            decoder.position = at + size
        yield APX if size else code


def _measure_rex2(raw: bytes) -> int:
    """Return the length of the instruction at the beginning if it has REX2, else 0."""
    rest = raw.lstrip(PREFIXES)
    if rest[:1] != REX2 or not rest[2:]:
        return 0
    second, low = rest[1] >> 7, rest[1] & 15
    if rest[2] >> 4 in RESERVED[second]:
        return 0
    older = raw[: len(raw) - len(rest)] + bytes([0x40 | low]) + b"\x0f" * second + rest[2:]
    instruction = iced_x86.Decoder(BITS, older).decode()
    return 0 if instruction.code == Code.INVALID else instruction.len + 1 - second


def _list_constants(module: object) -> Iterator[tuple[str, int]]:
    return ((name, value) for name, value in vars(module).items() if name.isupper())
