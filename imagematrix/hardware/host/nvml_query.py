"""Queries NVML and prints the result as one JSON object.

imagematrix.hardware.host.nvml runs this in a separate process, because a call into a faulty driver may never
return.
"""

from __future__ import annotations

import json
import sys

from imagematrix.hardware.host import nvml_library

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MIB = 1024 * 1024
OTHER = 999  # NVML_ERROR_UNKNOWN
NO_FUNCTION = 13  # NVML_ERROR_FUNCTION_NOT_FOUND: the driver is older than the function
NO_INSTANCE = 0xFFFFFFFF  # nvmlProcessInfo_t: the process is not on a MIG device


def query_nvml(nvml: Any) -> dict[str, object]:
    """Return the readings of the module `nvml` (pynvml) with error codes; see `host.nvml`."""
    answer: dict[str, object] = {"error": None, "message": "", "driver": None, "gpus": []}
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return answer | {"error": error.value, "message": str(error)}
    host = _Readings(nvml.NVMLError)
    host.read("driver", nvml.nvmlSystemGetDriverVersion)
    return answer | host.facts | {"gpus": [_query_gpu(nvml, index) for index in range(count)]}


def find_library(maps: str) -> str | None:
    """Return the path of the NVML library in the text of /proc/self/maps; its name ends in the version."""
    for line in maps.splitlines():
        path = line.partition("/")[2]
        if "libnvidia-ml.so" in path.rpartition("/")[2]:
            return f"/{path}"
    return None


def main() -> None:
    """Print the readings of NVML and the path of its library."""
    try:
        import pynvml
    except ImportError as error:
        sys.stdout.write(json.dumps({"error": None, "message": f"pynvml is not installed ({error})"}))
        return
    nvml_library.load_library()
    answer = query_nvml(pynvml)
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:  # noqa: PTH123 - no pathlib
        answer["library"] = find_library(maps.read())
    sys.stdout.write(json.dumps(answer))


class _Readings:
    """Facts read one by one: each is a value, or an error code."""

    def __init__(self, failure: type[Exception]) -> None:
        self._failure = failure
        self.facts: dict[str, Any] = {}
        self.errors: dict[str, int] = {}

    def read(self, name: str, call: Callable[..., Any], *arguments: object) -> Any:
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

    def read_newest(self, name: str, newer: Callable[[], Any], older: Callable[[], Any]) -> Any:
        """Call `older` if the driver lacks `newer`, which branch 510 introduced."""
        value = self.read(name, newer)
        if self.errors.get(name) == NO_FUNCTION:
            del self.errors[name]
            value = self.read(name, older)
        return value

    def list_errors(self) -> list[dict[str, object]]:
        return [{"fact": fact, "code": code} for fact, code in self.errors.items()]


def _query_gpu(nvml: Any, index: int) -> dict[str, Any]:
    reader = _Readings(nvml.NVMLError)
    handle = reader.read("handle", nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return {"index": index, "errors": reader.list_errors()}
    pci = reader.read("pci", nvml.nvmlDeviceGetPciInfo, handle)
    reader.read("uuid", nvml.nvmlDeviceGetUUID, handle)
    reader.read("name", nvml.nvmlDeviceGetName, handle)
    reader.read("minor", nvml.nvmlDeviceGetMinorNumber, handle)
    reader.read("compute", nvml.nvmlDeviceGetCudaComputeCapability, handle)
    reader.read("brand", nvml.nvmlDeviceGetBrand, handle)
    # The older function counts the driver's reserved memory as "used", unlike nvidia-smi.
    reader.read_newest(
        "memory",
        lambda: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2),
        lambda: nvml.nvmlDeviceGetMemoryInfo(handle),
    )
    reader.read("virtualization", nvml.nvmlDeviceGetVirtualizationMode, handle)
    mode = reader.read("mig", nvml.nvmlDeviceGetMigMode, handle)
    reader.read("temperature", nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    reader.read("persistence", nvml.nvmlDeviceGetPersistenceMode, handle)
    reader.read("fabric", _query_fabric_state, nvml, handle)
    reader.errors.pop("fabric", None)  # drivers before branch 530 and most GPUs lack it
    busy = reader.read("utilization", nvml.nvmlDeviceGetUtilizationRates, handle)
    processes = reader.read_newest(
        "processes",
        lambda: nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle),
        lambda: nvml.nvmlDeviceGetComputeRunningProcesses_v2(handle),
    )
    facts = reader.facts
    memory, compute = facts.pop("memory", None), facts.pop("compute", None)
    for name in ("handle", "pci", "mig"):
        facts.pop(name, None)
    if pci is not None:
        address = pci.busId
        facts["bus_id"] = address.decode("ascii", "replace") if isinstance(address, bytes) else str(address)
        facts["device_id"] = f"{pci.pciDeviceId >> 16:04x}"
    if memory is not None:
        facts["memory_mib"] = memory.total // MIB
        facts["memory_used_mib"] = memory.used // MIB
    if busy is not None:
        facts["utilization"] = busy.gpu
    if processes is not None:
        facts["processes"] = [_describe_process(process) for process in processes]
    if compute is not None:
        facts["compute"] = f"{compute[0]}.{compute[1]}"
    if mode is not None and mode[0]:  # the current mode; the second one is pending until a reset
        facts["mig"] = _query_mig_devices(nvml, handle, reader)
    return facts | {"index": index, "errors": reader.list_errors()}


def _query_fabric_state(nvml: Any, handle: Any) -> int | None:
    import ctypes

    info = nvml.c_nvmlGpuFabricInfo_t()
    nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    return int(info.state)


def _describe_process(process: Any) -> dict[str, int | None]:
    gpu, compute = process.gpuInstanceId, process.computeInstanceId
    return {
        "pid": process.pid,
        "gpu_instance": None if gpu in (None, NO_INSTANCE) else gpu,
        "compute_instance": None if compute in (None, NO_INSTANCE) else compute,
    }


def _query_mig_devices(nvml: Any, handle: Any, parent: _Readings) -> list[dict[str, Any]]:
    devices = []
    count = parent.read("mig-count", nvml.nvmlDeviceGetMaxMigDeviceCount, handle)
    parent.facts.pop("mig-count", None)
    for index in range(count or 0):
        reader = _Readings(nvml.NVMLError)
        device = reader.read("handle", nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        if device is None:  # not every index has a device
            continue
        reader.read("gpu_instance", nvml.nvmlDeviceGetGpuInstanceId, device)
        reader.read("compute_instance", nvml.nvmlDeviceGetComputeInstanceId, device)
        reader.read("uuid", nvml.nvmlDeviceGetUUID, device)
        memory = reader.read("memory", nvml.nvmlDeviceGetMemoryInfo, device)
        name = reader.read("name", nvml.nvmlDeviceGetName, device) or ""
        facts = {key: reader.facts.get(key) for key in ("gpu_instance", "compute_instance", "uuid")}
        facts["memory_mib"] = memory.total // MIB if memory is not None else None
        facts["profile"] = name.rpartition(" MIG ")[2] or None if " MIG " in name else None
        devices.append(facts)
    return devices
