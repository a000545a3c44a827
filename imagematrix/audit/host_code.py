"""What the instructions of one file need of a CPU: the HostCode."""

from __future__ import annotations

from dataclasses import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NAMES", "Carriers", "HostCode"]

NAMES = "names"  # the sign that something is named for certain CPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Carriers:
    """The functions that have instructions with one flag: how many, and the names of some, sorted."""

    count: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCode:
    """Flags of a CPU beyond the baseline of its architecture, by the functions whose instructions need them.

    `required` are those of code that runs without a question about the CPU, `chosen` those that only
    functions have which are chosen by the CPU. It can't be told how the others are reached. `signs` say how
    the file asks about the CPU: an instruction, a symbol, a file of the kernel, names for CPUs. `whole` is
    False where it is not known where functions begin.
    """

    functions: Mapping[str, Carriers] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    chosen: frozenset[str] = frozenset()
    signs: tuple[str, ...] = ()
    whole: bool = True

    @property
    def undecided(self) -> frozenset[str]:
        """The flags of which it can't be told whether the code runs without them."""
        return frozenset(self.functions) - self.required - self.chosen
