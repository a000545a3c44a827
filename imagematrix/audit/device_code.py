"""The targets of the device code in one file."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import reduce

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["NONE", "DeviceCode", "merged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCode:
    """Targets of device code: cubins ("90a"), PTX (target and ISA version: "90", "8.4"), code objects.

    `objects` are the targets of AMD's code objects, with the features that they enable or disable:
    "gfx90a:sramecc+:xnack-". `linked` is False for relocatable code, which a device linker has yet to turn
    into cubins and no driver loads. `compressed`: some code uses the compression that needs driver 550.54.14
    or newer (Zstandard: nvcc --compress-mode). `scattered`: only some parts have PTX, so PTX alone cannot run
    all of it on any GPU. `damaged`: some of it is truncated or invalid. `toolkits` are the CUDA releases
    whose compilers made the cubins. `sizes` are the stored bytes of the cubins ("sm_90a") and the PTX
    ("compute_90") for each target, sorted.
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

    @property
    def cuda(self) -> bool:
        """Whether there is code for NVIDIA's GPUs."""
        return bool(self.cubins or self.ptx)

    def __bool__(self) -> bool:
        """Whether there is any device code, even if damaged."""
        return bool(self.cubins or self.ptx or self.objects or self.damaged)


NONE = DeviceCode()


def merged(parts: Iterable[DeviceCode]) -> DeviceCode:
    """Merge the device code of several parts of a file. If any part is linked, only linked parts count."""
    present = [part for part in parts if part]
    linked = any(part.linked for part in present) or not present
    return reduce(_both, (part for part in present if part.linked == linked), NONE if linked else UNLINKED)


def _both(first: DeviceCode, other: DeviceCode) -> DeviceCode:
    return DeviceCode(
        cubins=first.cubins | other.cubins,
        ptx=first.ptx | other.ptx,
        objects=first.objects | other.objects,
        linked=first.linked,
        compressed=first.compressed or other.compressed,
        scattered=first.scattered
        or other.scattered
        or (first.cuda and other.cuda and bool(first.ptx) != bool(other.ptx)),
        damaged=first.damaged or other.damaged,
        toolkits=first.toolkits | other.toolkits,
        sizes=tuple(sorted((Counter(dict(first.sizes)) + Counter(dict(other.sizes))).items())),
    )


UNLINKED = DeviceCode(linked=False)
