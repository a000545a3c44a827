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
ADDRESS_TAKING = frozenset([Code.LEA_R64_M, Code.MOV_RM64_IMM32])


class X86:
    """The decoder for x86-64. It collects codes in a set, which takes half the time of a loop over them."""

    newer_flags = frozenset(["avx", "avx512f"])

    def list_codes(self, body: bytes) -> frozenset[int]:
        """Return the kinds of instructions in a function."""
        return frozenset({instruction.code for instruction in iced_x86.Decoder(BITS, body)})

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
        table: dict[int, frozenset[str]] = {}
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


def _list_constants(module: object) -> Iterator[tuple[str, int]]:
    return ((name, value) for name, value in vars(module).items() if name.isupper())
