"""The CPU flags that the instructions of one file need."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

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
    the program calls on certain CPUs. For all other flags, the audit cannot decide: they are `probable` if
    nearly all of the code is compiled for CPUs that have them, and `partial` if much of it is. `signs`
    are evidence that the file detects the CPU: an instruction, a symbol, a file of the kernel, names of CPUs.
    `whole` is False if the file does not tell where functions begin.
    """

    functions: Mapping[str, Carriers] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    probable: frozenset[str] = frozenset()
    partial: frozenset[str] = frozenset()
    chosen: frozenset[str] = frozenset()
    signs: tuple[str, ...] = ()
    whole: bool = True

    @property
    def of_alternative(self) -> HostCode:
        """The same code in a file that is loaded only on certain CPUs, so that no flag is required."""
        none = frozenset[str]()
        signs = tuple(dict.fromkeys((*self.signs, NAMES)))
        chosen = frozenset(self.functions)
        return replace(self, required=none, probable=none, partial=none, chosen=chosen, signs=signs)

    @property
    def undecided_flags(self) -> frozenset[str]:
        """The flags for which the audit cannot decide whether the code runs without them."""
        return frozenset(self.functions) - self.required - self.chosen
