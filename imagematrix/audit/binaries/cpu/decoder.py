"""What is asked of the decoder for a machine."""

from __future__ import annotations

from typing import NamedTuple, Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator


class Call(NamedTuple):
    """A call or a jump, with what was computed since the one before: it may be for the function called.

    `target` is 0 if the code does not state it. `slots` are the places of pointers that were loaded, such as
    those in the linker's table (GOT).
    """

    target: int
    addresses: frozenset[int]
    slots: frozenset[int]


class Decoder(Protocol):
    """A decoder for the functions of one machine.

    `newer_flags` are those of instructions that compilers for newer CPUs use in place of older ones.
    """

    newer_flags: frozenset[str]

    def list_codes(self, body: bytes) -> frozenset[int]:
        """Return the kinds of instructions in a function."""

    def has_only_instructions(self, codes: frozenset[int]) -> bool:
        """Whether a function contains nothing but instructions."""

    def detects_cpu(self, codes: frozenset[int]) -> bool:
        """Whether a function detects the CPU."""

    def find_flags(self, codes: frozenset[int]) -> frozenset[str]:
        """Return the flags beyond the baseline that instructions need."""

    def has_older(self, codes: frozenset[int]) -> bool:
        """Whether a function has instructions in whose place compilers for newer CPUs use others."""

    def count_by_flag(self, body: bytes) -> Counter[str]:
        """Return how many instructions need each flag."""

    def list_targets(self, body: bytes, address: int) -> Iterator[int]:
        """Yield the addresses that a function at `address` calls or jumps to."""

    def list_calls(self, body: bytes, address: int) -> Iterator[Call]:
        """Yield the calls and jumps of a function at `address`, and its end."""
