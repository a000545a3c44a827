"""The CPU flags that the instructions of one file need."""

from __future__ import annotations

from dataclasses import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NAMES", "Carriers", "HostCode"]

NAMES = "names"  # the sign that a file or its functions are named for certain CPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Carriers:
    """The functions with instructions that need one flag: their number, and some of their names, sorted."""

    count: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCode:
    """CPU flags beyond the architecture's baseline, with the functions whose instructions need them.

    `required` flags are in code that runs without checking the CPU. `chosen` flags are only in functions that
    the program calls on certain CPUs. For all other flags, the audit cannot decide. `signs` are evidence that
    the file detects the CPU: an instruction, a symbol, a file of the kernel, names of CPUs. `whole` is False
    if the file does not tell where functions begin.
    """

    functions: Mapping[str, Carriers] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    chosen: frozenset[str] = frozenset()
    signs: tuple[str, ...] = ()
    whole: bool = True

    @property
    def undecided(self) -> frozenset[str]:
        """The flags for which the audit cannot decide whether the code runs without them."""
        return frozenset(self.functions) - self.required - self.chosen
