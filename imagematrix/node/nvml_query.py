"""Asks NVML what it knows and prints it as one JSON object.

imagematrix.node.nvml runs this in a process of its own, because a call into a sick driver may never return.
"""

from __future__ import annotations

import json
import sys

from imagematrix.node import nvml_library

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["library", "main", "query"]

MIB = 1024 * 1024
OTHER = 999  # NVML_ERROR_UNKNOWN
NO_FUNCTION = 13  # NVML_ERROR_FUNCTION_NOT_FOUND: the driver is older than the function
NO_INSTANCE = 0xFFFFFFFF  # nvmlProcessInfo_t: the process is on no MIG device


def query(nvml: Any) -> dict[str, object]:
    """Return what the module `nvml` (pynvml) answers, error codes included; see imagematrix.node.nvml."""
    answer: dict[str, object] = {"error": None, "message": "", "driver": None, "gpus": []}
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return answer | {"error": error.value, "message": str(error)}
    host = _Asker(nvml.NVMLError)
    host.ask("driver", nvml.nvmlSystemGetDriverVersion)
    return answer | host.facts | {"gpus": [_gpu(nvml, index) for index in range(count)]}


def library(maps: str) -> str | None:
    """Return the path of the NVML library in the text of /proc/self/maps: its name ends in its version."""
    for line in maps.splitlines():
        path = line.partition("/")[2]
        if "libnvidia-ml.so" in path.rpartition("/")[2]:
            return f"/{path}"
    return None


def main() -> None:
    """Print what NVML answers, and which library answered."""
    try:
        import pynvml
    except ImportError as error:
        sys.stdout.write(json.dumps({"error": None, "message": f"pynvml is not installed ({error})"}))
        return
    nvml_library.load()
    answer = query(pynvml)
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:  # noqa: PTH123 - no pathlib
        answer["library"] = library(maps.read())
    sys.stdout.write(json.dumps(answer))


class _Asker:
    """Facts asked one by one: each is a value, or the code of the error that came instead."""

    def __init__(self, failure: type[Exception]) -> None:
        self._failure = failure
        self.facts: dict[str, Any] = {}
        self.errors: dict[str, int] = {}

    def ask(self, name: str, call: Callable[..., Any], *arguments: object) -> Any:
        try:
            value = call(*arguments)
        except self._failure as error:
            self.errors[name] = int(getattr(error, "value", OTHER))
            return None
        except UnicodeDecodeError:  # pynvml decodes names and UUIDs strictly
            self.errors[name] = OTHER
            return None
        self.facts[name] = value
        return value

    def ask_newest(self, name: str, newer: Callable[[], Any], older: Callable[[], Any]) -> Any:
        """Ask `older` where the driver does not have `newer`, which came with branch 510."""
        value = self.ask(name, newer)
        if self.errors.get(name) == NO_FUNCTION:
            del self.errors[name]
            value = self.ask(name, older)
        return value

    def refused(self) -> list[dict[str, object]]:
        return [{"fact": fact, "code": code} for fact, code in self.errors.items()]


def _gpu(nvml: Any, index: int) -> dict[str, Any]:
    asker = _Asker(nvml.NVMLError)
    handle = asker.ask("handle", nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return {"index": index, "errors": asker.refused()}
    pci = asker.ask("pci", nvml.nvmlDeviceGetPciInfo, handle)
    asker.ask("uuid", nvml.nvmlDeviceGetUUID, handle)
    asker.ask("name", nvml.nvmlDeviceGetName, handle)
    asker.ask("minor", nvml.nvmlDeviceGetMinorNumber, handle)
    asker.ask("compute", nvml.nvmlDeviceGetCudaComputeCapability, handle)
    asker.ask("brand", nvml.nvmlDeviceGetBrand, handle)
    # What the driver keeps for itself is "used" in the older answer, and is not in what nvidia-smi shows.
    asker.ask_newest(
        "memory",
        lambda: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2),
        lambda: nvml.nvmlDeviceGetMemoryInfo(handle),
    )
    asker.ask("virtualization", nvml.nvmlDeviceGetVirtualizationMode, handle)
    mode = asker.ask("mig", nvml.nvmlDeviceGetMigMode, handle)
    asker.ask("temperature", nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    asker.ask("persistence", nvml.nvmlDeviceGetPersistenceMode, handle)
    asker.ask("fabric", _fabric, nvml, handle)
    asker.errors.pop("fabric", None)  # drivers before branch 530 and most GPUs know of none
    busy = asker.ask("utilization", nvml.nvmlDeviceGetUtilizationRates, handle)
    processes = asker.ask_newest(
        "processes",
        lambda: nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle),
        lambda: nvml.nvmlDeviceGetComputeRunningProcesses_v2(handle),
    )
    facts = asker.facts
    memory, compute = facts.pop("memory", None), facts.pop("compute", None)
    for name in ("handle", "pci", "mig"):
        facts.pop(name, None)
    if pci is not None:
        facts["bus_id"] = _ascii(pci.busId)
        facts["device_id"] = f"{pci.pciDeviceId >> 16:04x}"
    if memory is not None:
        facts["memory_mib"] = memory.total // MIB
        facts["memory_used_mib"] = memory.used // MIB
    if busy is not None:
        facts["utilization"] = busy.gpu
    if processes is not None:
        facts["processes"] = [_process(process) for process in processes]
    if compute is not None:
        facts["compute"] = f"{compute[0]}.{compute[1]}"
    if mode is not None and mode[0]:
        facts["mig"] = _mig(nvml, handle, asker)
    return facts | {"index": index, "errors": asker.refused()}


def _fabric(nvml: Any, handle: Any) -> int | None:
    import ctypes

    info = nvml.c_nvmlGpuFabricInfo_t()
    nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    return int(info.state)


def _process(process: Any) -> dict[str, int | None]:
    gpu, compute = process.gpuInstanceId, process.computeInstanceId
    return {
        "pid": process.pid,
        "gpu_instance": None if gpu in (None, NO_INSTANCE) else gpu,
        "compute_instance": None if compute in (None, NO_INSTANCE) else compute,
    }


def _mig(nvml: Any, handle: Any, parent: _Asker) -> list[dict[str, Any]]:
    devices = []
    count = parent.ask("mig-count", nvml.nvmlDeviceGetMaxMigDeviceCount, handle)
    parent.facts.pop("mig-count", None)
    for index in range(count or 0):
        asker = _Asker(nvml.NVMLError)
        device = asker.ask("handle", nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        if device is None:  # not every index has a device
            continue
        asker.ask("gpu_instance", nvml.nvmlDeviceGetGpuInstanceId, device)
        asker.ask("compute_instance", nvml.nvmlDeviceGetComputeInstanceId, device)
        asker.ask("uuid", nvml.nvmlDeviceGetUUID, device)
        memory = asker.ask("memory", nvml.nvmlDeviceGetMemoryInfo, device)
        name = asker.ask("name", nvml.nvmlDeviceGetName, device) or ""
        facts = {key: asker.facts.get(key) for key in ("gpu_instance", "compute_instance", "uuid")}
        facts["memory_mib"] = memory.total // MIB if memory is not None else None
        facts["profile"] = name.rpartition(" MIG ")[2] or None if " MIG " in name else None
        devices.append(facts)
    return devices


def _ascii(text: Any) -> str:
    return text.decode("ascii", "replace") if isinstance(text, bytes) else str(text)
