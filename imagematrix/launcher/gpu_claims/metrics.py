"""The status of a node's GPUs as metrics in Prometheus' text format: `imagematrix gpus --metrics`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from imagematrix.hardware.gpu_request.choice import get_memory_mib, name_mig_device
from imagematrix.launcher.gpu_claims.shares import select_counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.launcher.gpu_claims.report import GpuStatus

MIB = 1024**2
LABELS = ("gpu", "uuid", "name", "profile")
# Unknown values have no sample.
METRICS = {
    "usable": "Whether the GPU or MIG device works: 1 or 0.",
    "free": "Whether it works and nothing uses it: 1 or 0.",
    "users": "Number of containers, processes and leases that use it; those of one launch count once.",
    "shares": "Number of its users that declared a share of its memory.",
    "memory_bytes": "Total memory.",
    "memory_used_bytes": "Memory in use, as the driver reports it.",
    "memory_shareable_bytes": "Memory left for further shares; no sample if it is used whole.",
    "utilization_ratio": "Load from 0 to 1, as the driver reports it.",
    "temperature_celsius": "Temperature.",
}


def format_metrics(statuses: Iterable[GpuStatus]) -> str:
    """Return the metrics of GPUs, and of the MIG devices of those in MIG mode."""
    registry = CollectorRegistry()
    gauges = {
        name: Gauge(f"imagematrix_gpu_{name}", meaning, LABELS, registry=registry)
        for name, meaning in METRICS.items()
    }
    for status in [device for gpu_status in statuses for device in (gpu_status, *gpu_status.parts)]:
        gpu = status.gpu
        labels = (str(gpu.index), gpu.uuid or "", gpu.name or "", "")
        if gpu.mig and not status.parts:
            (device,) = gpu.mig
            labels = (name_mig_device(gpu, device), device.uuid or "", gpu.name or "", device.profile or "")
        for name, value in _list_values(status):
            if value is not None:
                gauges[name].labels(*labels).set(value)
    return generate_latest(registry).decode()


def _list_values(status: GpuStatus) -> Iterator[tuple[str, float | None]]:
    gpu, reading = status.gpu, status.reading
    yield "usable", gpu.usable
    if not status.parts:  # else its MIG devices have these values
        users = select_counted(status.used_by, mps=True) if status.complete else None
        yield "free", status.is_free
        yield "users", len(users) if users is not None else None
        yield "shares", sum(user.vram_mib is not None for user in users) if users is not None else None
        yield "memory_shareable_bytes", _convert_to_bytes(status.free_mib)
    yield "memory_bytes", _convert_to_bytes(gpu.memory_mib if status.parts else get_memory_mib(gpu))
    if reading is not None:
        yield "memory_used_bytes", _convert_to_bytes(reading.memory_used_mib)
        yield "utilization_ratio", None if reading.utilization is None else reading.utilization / 100
        yield "temperature_celsius", reading.temperature


def _convert_to_bytes(mib: int | None) -> int | None:
    return None if mib is None else mib * MIB
