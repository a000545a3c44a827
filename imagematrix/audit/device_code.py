"""The device code of one file: what it is made for, whoever will run it."""

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

    `objects` are the targets of AMD's code objects, with the features they were made for or without:
    "gfx90a:sramecc+:xnack-". `linked` is False of what a device linker has yet to make cubins of, which no
    driver loads. `compressed` says whether some of it is compressed in the way that needs a driver from
    550.54.14 on (Zstandard: nvcc --compress-mode). `scattered` says whether only some of its parts have PTX,
    so that no GPU runs all of it by PTX alone. `damaged` says whether some of it is cut off. `sizes` are the
    bytes of cubins ("sm_90a") and of PTX ("compute_90") as they are stored, sorted.
    """

    cubins: frozenset[str] = frozenset()
    ptx: frozenset[tuple[str, str]] = frozenset()
    objects: frozenset[str] = frozenset()
    linked: bool = True
    compressed: bool = False
    scattered: bool = False
    damaged: bool = False
    sizes: tuple[tuple[str, int], ...] = field(default=(), compare=False)

    @property
    def cuda(self) -> bool:
        """Whether some of it is for NVIDIA's GPUs."""
        return bool(self.cubins or self.ptx)

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self.cubins or self.ptx or self.objects or self.damaged)


NONE = DeviceCode()


def merged(parts: Iterable[DeviceCode]) -> DeviceCode:
    """Return the device code of several parts of a file; what is linked hides what is not."""
    present = [part for part in parts if part]
    linked = any(part.linked for part in present) or not present
    return reduce(_both, (part for part in present if part.linked == linked), NONE if linked else UNLINKED)


def _both(one: DeviceCode, other: DeviceCode) -> DeviceCode:
    return DeviceCode(
        cubins=one.cubins | other.cubins,
        ptx=one.ptx | other.ptx,
        objects=one.objects | other.objects,
        linked=one.linked,
        compressed=one.compressed or other.compressed,
        scattered=one.scattered
        or other.scattered
        or (one.cuda and other.cuda and bool(one.ptx) != bool(other.ptx)),
        damaged=one.damaged or other.damaged,
        sizes=tuple(sorted((Counter(dict(one.sizes)) + Counter(dict(other.sizes))).items())),
    )


UNLINKED = DeviceCode(linked=False)
