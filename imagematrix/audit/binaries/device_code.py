"""The targets of the device code in one file."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import reduce

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True, kw_only=True)
class Fatbins:
    """`count` fatbins of a file that have kernels for the same targets, as in DeviceCode.

    `of_project`: the names of kernels show that they are of the file's own project, and not of a library that
    is linked in.
    """

    count: int
    cubins: frozenset[str]
    ptx: frozenset[tuple[str, str]]
    of_project: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCode:
    """Targets of device code: cubins ("90a"), PTX (target and ISA version: "90", "8.4"), code objects.

    `objects` are the targets of AMD's code objects, with the features that they enable or disable:
    "gfx90a:sramecc+:xnack-". `linked` is False for relocatable code, which a device linker has yet to turn
    into cubins and no driver loads. `compressed`: some code uses the compression that needs driver 550.54.14
    or newer (Zstandard: nvcc --compress-mode). `scattered`: only some parts have PTX, so PTX alone cannot run
    all of it on any GPU. `damaged`: some of it is truncated or invalid. `toolkits` are the CUDA releases
    whose compilers made the cubins. `sizes` are the stored bytes of the cubins ("sm_90a") and the PTX
    ("compute_90") for each target, sorted. `parts` are the fatbins that have kernels.
    """

    cubins: frozenset[str] = frozenset()
    ptx: frozenset[tuple[str, str]] = frozenset()
    objects: frozenset[str] = frozenset()
    linked: bool = True
    compressed: bool = False
    scattered: bool = False
    damaged: bool = False
    toolkits: frozenset[str] = field(default=frozenset(), compare=False)
    sizes: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    parts: tuple[Fatbins, ...] = field(default=(), compare=False)

    @property
    def cuda(self) -> bool:
        """Whether there is code for NVIDIA's GPUs."""
        return bool(self.cubins or self.ptx)

    @property
    def deciding_code(self) -> DeviceCode:
        """The targets that decide on which GPUs the code runs: those of the project's own kernels, if known.

        Code for other GPUs, in libraries that are linked in, would not make the file run there. Kernels of no
        known project all count.
        """
        counting = [part for part in self.parts if part.of_project] or self.parts
        if not counting:
            return self
        return replace(
            self,
            cubins=frozenset().union(*(part.cubins for part in counting)),
            ptx=frozenset().union(*(part.ptx for part in counting)),
            scattered=len({bool(part.ptx) for part in counting}) > 1,
        )

    def __bool__(self) -> bool:
        """Whether there is any device code, even if damaged."""
        return bool(self.cubins or self.ptx or self.objects or self.damaged)


NONE = DeviceCode()


def merge_device_code(parts: Iterable[DeviceCode]) -> DeviceCode:
    """Merge the device code of several parts of a file. If any part is linked, only linked parts count."""
    present = [part for part in parts if part]
    linked = any(part.linked for part in present) or not present
    return reduce(_merge, (part for part in present if part.linked == linked), NONE if linked else UNLINKED)


def _merge(first: DeviceCode, second: DeviceCode) -> DeviceCode:
    only_one_has_ptx = first.cuda and second.cuda and bool(first.ptx) != bool(second.ptx)
    return DeviceCode(
        cubins=first.cubins | second.cubins,
        ptx=first.ptx | second.ptx,
        objects=first.objects | second.objects,
        linked=first.linked,
        compressed=first.compressed or second.compressed,
        scattered=first.scattered or second.scattered or only_one_has_ptx,
        damaged=first.damaged or second.damaged,
        toolkits=first.toolkits | second.toolkits,
        sizes=tuple(sorted((Counter(dict(first.sizes)) + Counter(dict(second.sizes))).items())),
        parts=first.parts + second.parts,
    )


UNLINKED = DeviceCode(linked=False)
