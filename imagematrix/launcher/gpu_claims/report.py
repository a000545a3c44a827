"""The status of a node's GPUs, with usage and load: the output of `imagematrix gpus`."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.hardware.gpu_request.choice import list_mig_devices
from imagematrix.launcher.gpu_claims import shares
from imagematrix.launcher.gpu_claims.usage import find_consumers, list_lock_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.hardware.host.host import Gpu
    from imagematrix.hardware.host.nvml import Nvml, NvmlGpu
    from imagematrix.launcher.gpu_claims.usage import Consumer, Usage

SCHEMA = "imagematrix.gpus/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStatus:
    """One GPU, or a GPU with a single MIG device in its `mig`, and its consumers.

    `reading` is NVML's current reading, None if there is none. `parts` are its MIG devices. `complete` is
    false if a source of usage did not answer, so that consumers may be missing from `used_by`.
    """

    gpu: Gpu
    used_by: tuple[Consumer, ...]
    complete: bool = True
    reading: NvmlGpu | None = None
    parts: tuple[GpuStatus, ...] = ()

    @property
    def is_free(self) -> bool | None:
        """Whether it is usable and unused; None if unknown."""
        if not self.gpu.usable or self.used_by:
            return False
        return True if self.complete else None

    @property
    def free_mib(self) -> int | None:
        """The MiB that further shares can get, None if the whole GPU is in use or the usage is unknown.

        A running MPS server does not count: the memory is then for shares that use MPS.
        """
        complete = self.complete and self.gpu.usable
        return shares.compute_remaining(self.gpu, self.used_by, mps=True) if complete else None


def list_statuses(
    gpus: Iterable[Gpu], usage: Usage, nvml: Nvml | None, *, complete: bool = True
) -> tuple[GpuStatus, ...]:
    """Return the status of each of `gpus`; `complete` states whether `usage` covers all sources."""
    readings = {gpu.minor: gpu for gpu in nvml.gpus} if nvml else {}
    return tuple(
        GpuStatus(
            gpu=gpu,
            used_by=_find_consumers(gpu, usage),
            complete=complete,
            reading=readings.get(gpu.minor) if gpu.minor is not None else None,
            parts=tuple(
                GpuStatus(gpu=part, used_by=_find_consumers(part, usage), complete=complete)
                for part in list_mig_devices(gpu)
            ),
        )
        for gpu in gpus
    )


def make_gpus_document(gpus: Iterable[GpuStatus], warnings: Iterable[str]) -> dict[str, object]:
    """Return the Gpus document."""
    return {
        "schema": SCHEMA,
        "gpus": [_make_gpu_document(status) for status in gpus],
        "warnings": list(warnings),
    }


def _find_consumers(gpu: Gpu, usage: Usage) -> tuple[Consumer, ...]:
    if gpu.minor is None:  # nothing can use a GPU without a device node
        return ()
    return find_consumers(usage, list_lock_names(gpu))


def _make_gpu_document(status: GpuStatus) -> dict[str, object]:
    gpu, reading = status.gpu, status.reading
    mig = []
    for part in status.parts:
        (device,) = part.gpu.mig or ()
        mig.append({**device.to_json(), **_make_usage_document(part)})
    return {
        "index": gpu.index,
        "minor": gpu.minor,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "state": gpu.state,
        **_make_usage_document(status),
        "utilization_percent": reading.utilization if reading else None,
        "memory_used_mib": reading.memory_used_mib if reading else None,
        "memory_mib": gpu.memory_mib,
        "temperature_c": reading.temperature if reading else None,
        "mig": None if gpu.mig is None else mig,
    }


def _make_usage_document(status: GpuStatus) -> dict[str, object]:
    return {
        "free": status.is_free,
        "used_by": [consumer.to_json() for consumer in status.used_by],
        "vram_free_mib": status.free_mib,
    }
