"""The Need: one way for a node to fit a variant, as conditions that a scheduler can check."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.hardware.vendors import marches

TYPE_CHECKING = False
if TYPE_CHECKING:
    Version = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One way for a node to fit a variant: all of its conditions have to hold. None is no condition.

    `arch` is as in a platform ("amd64"); the node has the CPU flags `flags`, and lacks those in `without`. It
    has GPUs, or none (`gpus`), and signs of other `accelerators`, or none. Every GPU has a capability in
    `computes` (times ten, sorted), a state in `states` and a brand in `brands`, is a data-centre part if
    `data_centre`, the driver branch `limit` supports it, and it has `memory_mib` or more.

    A driver is `loaded`, or not. It has the version `driver`, or is not older than `oldest`, older than
    `below`, and not one in `other_than`; the kind of its kernel modules is in `modules`, and the version of
    the node's own user-mode driver `differs` from its own, or does not, as far as known.
    """

    arch: str
    flags: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    gpus: bool | None = None
    accelerators: bool | None = None
    computes: tuple[int, ...] | None = None
    states: tuple[str, ...] | None = None
    brands: tuple[str, ...] | None = None
    data_centre: bool = False
    limit: int | None = None
    memory_mib: int | None = None
    loaded: bool | None = None
    driver: str | None = None
    oldest: Version | None = None
    below: Version | None = None
    other_than: frozenset[str] = frozenset()
    modules: tuple[str | None, ...] | None = None
    differs: bool | None = None

    @property
    def cpu_level(self) -> str | None:
        """The highest psABI level whose flags it has; None below the first, or not x86."""
        return marches.get_level(self.flags) if self.arch == "amd64" else None
