"""Usage of GPUs as data: which lease, process or container uses which GPU.

The unit of allocation is a GPU, or each MIG device of a GPU in MIG mode. Its key contains the minor number of
the device node, because all users of a node see the same number: "nvidia3", "nvidia3-gi2-ci0".
"""

from __future__ import annotations

from imagematrix.common.record import Record
from imagematrix.errors import ProbeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from imagematrix.hardware.host.host import Gpu

Usage = dict[str, tuple["Consumer", ...]]


class Consumer(Record):
    """A "lease", "process" or "container" (its `kind`) that uses a GPU; `name` is its name in messages.

    `pid` and `user` are those of the process, None if unknown. `vram_mib` is the declared share of the
    memory in MiB, None if it uses the whole GPU. `owner_ids` are container ids and the name of a lease:
    consumers with a common one belong to the same launch.
    """

    kind: str
    name: str
    pid: int | None = None
    user: str | None = None
    vram_mib: int | None = None
    owner_ids: frozenset[str] = frozenset()

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


def format_mig_key(minor: int, gpu_instance: int, compute_instance: int) -> str:
    """Return the key of one MIG device of the GPU with this device minor."""
    return f"nvidia{minor}-gi{gpu_instance}-ci{compute_instance}"


def list_lock_names(gpu: Gpu) -> tuple[str, ...]:
    """Return the key of `gpu`, or those of its MIG devices; raise ProbeError if its minor is unknown."""
    if gpu.minor is None:
        raise ProbeError(
            f"device minor of {gpu.label} unknown: cannot determine what uses it",
            remedy="load the driver, which writes the minor to /proc/driver/nvidia/gpus/*/information",
        )
    if not gpu.mig:
        return (f"nvidia{gpu.minor}",)
    return tuple(
        format_mig_key(gpu.minor, device.gpu_instance, device.compute_instance) for device in gpu.mig
    )


def find_consumers(usage: Mapping[str, tuple[Consumer, ...]], keys: Iterable[str]) -> tuple[Consumer, ...]:
    """Return the consumers of everything that overlaps with one of `keys`."""
    requested = tuple(keys)
    return tuple(
        dict.fromkeys(
            consumer
            for key, consumers in usage.items()
            if has_overlap([key], requested)
            for consumer in consumers
        )
    )


def has_overlap(first: Iterable[str], second: Iterable[str]) -> bool:
    """Whether two lists of keys share a device; a GPU overlaps with each of its MIG devices."""
    keys = tuple(second)
    # With the dash, because nvidia1 is not a part of nvidia10.
    return any(a == b or a.startswith(f"{b}-") or b.startswith(f"{a}-") for a in first for b in keys)


def merge_usages(*usages: Mapping[str, tuple[Consumer, ...]]) -> Usage:
    """Return the usage from several sources as one, without duplicates."""
    result: Usage = {}
    for usage in usages:
        for key, consumers in usage.items():
            result[key] = tuple(dict.fromkeys(result.get(key, ()) + consumers))
    return result
