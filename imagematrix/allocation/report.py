"""The GPUs of a node with their users and what they do: the answer of `imagematrix gpus`."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.allocation import shares
from imagematrix.allocation.usage import keys, users
from imagematrix.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.allocation.usage import Use, Uses
    from imagematrix.node.host import Gpu
    from imagematrix.node.nvml import Nvml, NvmlGpu

__all__ = ["SCHEMA", "Status", "statuses", "to_json"]

SCHEMA = "imagematrix.gpus/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One GPU, or with a single device in its `mig` that MIG device, and who uses it.

    `live` is what NVML says of it right now, None where it says nothing. `parts` are its MIG devices. `known`
    is false where somebody could not be asked, so that there may be users beyond `used_by`.
    """

    gpu: Gpu
    used_by: tuple[Use, ...]
    known: bool = True
    live: NvmlGpu | None = None
    parts: tuple[Status, ...] = ()

    @property
    def free(self) -> bool | None:
        """Whether it can be used, and nobody does; None where nobody knows."""
        if not self.gpu.usable or self.used_by:
            return False
        return True if self.known else None

    @property
    def left_mib(self) -> int | None:
        """The MiB that can still be shared, None where somebody uses all of it or they are not known.

        Where the server of MPS runs, it is for those who share by it.
        """
        known = self.known and self.gpu.usable
        return shares.left(self.gpu, self.used_by, mps=True) if known else None


def statuses(
    gpus: Iterable[Gpu], uses: Uses, answer: Nvml | None, *, known: bool = True
) -> tuple[Status, ...]:
    """Return the status of each of `gpus`; `known` says that `uses` are all there are."""
    live = {one.minor: one for one in answer.gpus} if answer else {}
    return tuple(
        _status(gpu, uses, live.get(gpu.minor) if gpu.minor is not None else None, known=known)
        for gpu in gpus
    )


def to_json(found: Iterable[Status], warnings: Iterable[str]) -> dict[str, object]:
    """Return the Gpus document."""
    return {"schema": SCHEMA, "gpus": [_gpu_json(status) for status in found], "warnings": list(warnings)}


def _status(gpu: Gpu, uses: Uses, live: NvmlGpu | None, *, known: bool) -> Status:
    parts = (replace(gpu, mig=(device,)) for device in gpu.mig or ())
    return Status(
        gpu=gpu,
        used_by=_users(gpu, uses),
        known=known,
        live=live,
        parts=tuple(Status(gpu=part, used_by=_users(part, uses), known=known) for part in parts),
    )


def _users(gpu: Gpu, uses: Uses) -> tuple[Use, ...]:
    return () if gpu.minor is None else users(uses, keys(gpu))  # nobody can use what has no node


def _gpu_json(status: Status) -> dict[str, object]:
    gpu, live = status.gpu, status.live
    return {
        "index": gpu.index,
        "minor": gpu.minor,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "state": gpu.state,
        **_use_json(status),
        "utilization_percent": live.utilization if live else None,
        "memory_used_mib": live.memory_used_mib if live else None,
        "memory_mib": gpu.memory_mib,
        "temperature_c": live.temperature if live else None,
        "mig": None if gpu.mig is None else [_mig_json(part) for part in status.parts],
    }


def _mig_json(status: Status) -> dict[str, object]:
    (device,) = status.gpu.mig or ()
    return {**device.to_json(), **_use_json(status)}


def _use_json(status: Status) -> dict[str, object]:
    return {
        "free": status.free,
        "used_by": [use.to_json() for use in status.used_by],
        "vram_free_mib": status.left_mib,
    }
