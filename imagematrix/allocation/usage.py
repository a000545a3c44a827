"""Uses: who has which GPU, as data.

What can be given out is a GPU, or each MIG device of a GPU that has some. It goes by the number of the device
node, because that is the same for everybody on the node: "nvidia3", "nvidia3-gi2-ci0".
"""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.errors import ProbeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from imagematrix.node.host import Gpu

__all__ = ["Use", "Uses", "joined", "keys", "mig_key", "overlap", "users"]

Uses = dict[str, tuple["Use", ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One use of a GPU: by a "lease", a "process" or a "container", with what to call it.

    `pid` and `user` are those of the process, None where they are not known. `vram_mib` is the share of the
    memory that was declared, in MiB, None where the GPU is used whole. `marks` are the ids of containers and
    the name of a lease, by which the uses of one launch know each other.
    """

    kind: str
    name: str
    pid: int | None = None
    user: str | None = None
    vram_mib: int | None = None
    marks: frozenset[str] = frozenset()

    def __str__(self) -> str:
        facts = [f"pid {self.pid}"] if self.pid is not None else []
        facts += [self.user] if self.user else []
        facts += [f"share of {self.vram_mib} MiB"] if self.vram_mib is not None else []
        return f"{self.kind} {self.name}" + (f" ({', '.join(facts)})" if facts else "")

    def to_json(self) -> dict[str, object]:
        """Return one element of the `used_by` of the Gpus document."""
        return {
            "kind": self.kind,
            "name": self.name,
            "pid": self.pid,
            "user": self.user,
            "vram_mib": self.vram_mib,
        }


def mig_key(minor: int, gpu_instance: int, compute_instance: int) -> str:
    """Return the key of one MIG device of the GPU with this device minor."""
    return f"nvidia{minor}-gi{gpu_instance}-ci{compute_instance}"


def keys(gpu: Gpu) -> tuple[str, ...]:
    """Return the key of `gpu`, or those of its MIG devices; raise ProbeError where its minor is unknown."""
    if gpu.minor is None:
        raise ProbeError(
            f"the device minor of {gpu.label} is unknown, so that nobody can tell who uses it",
            remedy="it is in /proc/driver/nvidia/gpus/*/information once the driver is loaded",
        )
    if not gpu.mig:
        return (f"nvidia{gpu.minor}",)
    return tuple(mig_key(gpu.minor, device.gpu_instance, device.compute_instance) for device in gpu.mig)


def users(uses: Mapping[str, tuple[Use, ...]], wanted: Iterable[str]) -> tuple[Use, ...]:
    """Return all that use one of the keys `wanted`."""
    keys = tuple(wanted)
    return tuple(dict.fromkeys(use for key, found in uses.items() if overlap([key], keys) for use in found))


def overlap(some: Iterable[str], others: Iterable[str]) -> bool:
    """Whether keys have something in common; who has a GPU has its MIG devices, and the reverse."""
    keys = tuple(others)
    return any(
        one == key or one.startswith(f"{key}-") or key.startswith(f"{one}-") for one in some for key in keys
    )


def joined(*several: Mapping[str, tuple[Use, ...]]) -> Uses:
    """Return the uses of `several` sources as one."""
    found: Uses = {}
    for uses in several:
        for key, added in uses.items():
            found[key] = tuple(dict.fromkeys(found.get(key, ()) + added))
    return found
