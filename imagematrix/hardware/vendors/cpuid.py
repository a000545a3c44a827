"""CPU flags that compilers need and that Linux does not print in /proc/cpuinfo: where CPUID has them.

A kernel prints the flags that have a name in its table of features. Some recent instruction sets have none,
because they need nothing from the kernel but registers that it saves anyway.
"""

from __future__ import annotations

from functools import cache

from imagematrix.common.record import Record
from imagematrix.hardware.vendors import _data

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

REGISTERS = ("eax", "ebx", "ecx", "edx")
ARCH = "x86_64"
Leaf = tuple[int, int]  # the numbers of a leaf and of its subleaf


class Bit(Record):
    """The place of one flag: a leaf, one of `REGISTERS`, and the bits from `low` on, `width` of them.

    Their value must be at least `least`. `proofs` are the other flags that the CPU must have. If
    `active`, the kernel must also have enabled the flag's registers, which no printed flag shows.
    """

    leaf: Leaf
    register: int
    low: int
    width: int
    least: int
    proofs: frozenset[str]
    active: bool

    def is_set(self, registers: tuple[int, ...]) -> bool:
        """Whether the registers of its leaf show the flag."""
        return (registers[self.register] >> self.low) % (1 << self.width) >= self.least


@cache
def list_unprinted_flags() -> Mapping[str, Bit]:
    """Return the flags of x86-64 that kernels do not print."""
    table = _data.load("cpuid.json")
    needed_by_all = table["all"]
    bits = {}
    for flag, row in table["bits"].items():
        leaf, _, subleaf = row["leaf"].partition(".")
        bits[flag] = Bit(
            leaf=(int(leaf, 16), int(subleaf, 16)),
            register=REGISTERS.index(row["register"]),
            low=row["bit"],
            width=row.get("width", 1),
            least=row.get("least", 1),
            proofs=frozenset(f"{needed_by_all} {row.get('with', '')}".split()),
            active=row.get("active", False),
        )
    return bits


@cache
def list_visible_flags(arch: str) -> frozenset[str]:
    """Return the flags that a probe can find on some host: printed by the kernel, or read from CPUID."""
    printed = frozenset(_data.load("cpuid.json")["printed"].get(arch, "").split())
    return printed | list_unprinted_flags().keys() if arch == ARCH else printed


def decode_flags(
    shown: AbstractSet[str],
    registers: Mapping[Leaf, tuple[int, ...]],
    active: Mapping[Leaf, tuple[int, ...]],
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the unprinted flags of a CPU that prints `shown`, and those whose leaf is missing.

    `registers` are what CPUID returns for each leaf, `active` the same with only the bits of usable features.
    """
    present: set[str] = set()
    unknown: set[str] = set()
    for flag, bit in list_unprinted_flags().items():
        # The table has a flag after those that it needs.
        if not bit.proofs <= shown | present:
            continue
        values = registers.get(bit.leaf)
        usable = active.get(bit.leaf) if bit.active and values and bit.is_set(values) else values
        if usable is None:
            unknown.add(flag)
        elif bit.is_set(usable):
            present.add(flag)
    return frozenset(present), frozenset(unknown)
