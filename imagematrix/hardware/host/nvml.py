"""Readings from NVML, the driver's user-mode library, which has more facts than the kernel shows.

A separate process with a time limit queries it: a call into a faulty driver may never return, and the first
call on a node without persistence mode takes seconds. Starting that process costs about 40 ms.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field, replace

from imagematrix.errors import UsageError
from imagematrix.hardware.host import nvidia, pci
from imagematrix.hardware.host.host import MigDevice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from subprocess import Popen

    from imagematrix.common.json_documents import Fields
    from imagematrix.hardware.host.host import Driver, Gpu

TIMEOUT_S = 20.0  # initialising eight idle GPUs takes about ten

# Codes of nvmlReturn_t.
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_LOADED = 9
NO_LIBRARY = 12
MISMATCH = 18
LOST = frozenset({15, 16})  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A compute process on a GPU, or on the MIG device with the two instance numbers."""

    pid: int
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlGpu:
    """NVML's reading of one GPU.

    `index` is NVML's, in PCI bus order. `virtualization` is an nvmlGpuVirtualizationMode_t: 0 none, 1 passed
    through, 2 a vGPU in a guest, 3 and 4 a host that provides vGPUs. `utilization` is in percent,
    `temperature` in degrees Celsius; `persistence` is 0 if the driver releases an idle GPU. `fabric` is an
    nvmlGpuFabricState_t: 0 not supported, 1 not started, 2 in progress, 3 completed. `errors` maps a fact to
    NVML's error code; the key "handle" is for the GPU as a whole.
    """

    index: int
    bus_id: str | None = None
    device_id: str | None = None
    minor: int | None = None
    uuid: str | None = None
    name: str | None = None
    compute: str | None = None
    brand: str | None = None
    memory_mib: int | None = None
    mig: tuple[MigDevice, ...] | None = None
    virtualization: int | None = None
    processes: tuple[Process, ...] | None = None
    memory_used_mib: int | None = None
    utilization: int | None = None
    temperature: int | None = None
    persistence: int | None = None
    fabric: int | None = None
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def shares_memory(self) -> bool:
        """Whether it has no memory of its own, as GB10: NVML then does not support the question for it."""
        return self.errors.get("memory") == NOT_SUPPORTED and self.mig is None

    @property
    def is_reached(self) -> bool:
        """Whether the GPU responded; it may fail as a whole, or later with GPU_IS_LOST or RESET_REQUIRED."""
        return "handle" not in self.errors and LOST.isdisjoint(self.errors.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvml:
    """The result of a query of NVML.

    `message` is the reason why it failed, empty if it succeeded. `error` is NVML's error code, None if NVML
    was not reached. `driver` is the version that NVML reports, `library` the version of NVML's own file.
    """

    error: int | None = None
    message: str = ""
    driver: str | None = None
    library: str | None = None
    gpus: tuple[NvmlGpu, ...] = ()


def read_nvml(timeout_s: float = TIMEOUT_S) -> Nvml:
    """Query NVML, for at most `timeout_s` seconds."""
    import json
    import subprocess

    from imagematrix.common.child_modules import make_child_command

    if not sys.executable:
        return Nvml(message="cannot start a process: sys.executable is not set")
    try:
        child = subprocess.Popen(
            make_child_command("imagematrix.hardware.host.nvml_query"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        return Nvml(message=f"cannot start a process: {error.strerror}")
    try:
        output, stderr = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill(child)
        return Nvml(message=f"no response within {timeout_s:g} seconds")
    try:
        return parse_nvml(json.loads(output))
    except (ValueError, UsageError):
        last = stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"exit {child.returncode}"]
        return Nvml(message=f"the query process failed: {last[0]}")


def parse_nvml(document: object) -> Nvml:
    """Return the result that nvml_query printed; raise UsageError if it is malformed."""
    from imagematrix.common.json_documents import Fields

    fields = Fields(document, "NVML")
    version = re.search(r"libnvidia-ml\.so\.(\d+(?:\.\d+)+)$", fields.get_text_or_none("library") or "")
    return Nvml(
        error=fields.get_integer_or_none("error"),
        message=fields.get_text("message"),
        driver=fields.get_text_or_none("driver"),
        library=version[1] if version else None,
        gpus=tuple(_read_gpu(gpu) for gpu in fields.list_objects("gpus")),
    )


def match_readings(readings: Iterable[NvmlGpu], gpus: Iterable[Gpu]) -> tuple[NvmlGpu, ...]:
    """Return NVML's readings of `gpus`, with the numbers that these have in their host.

    NVML counts the GPUs that its driver has, a host also those that another driver has.
    """
    numbers = {gpu.pci_bus_id: gpu.index for gpu in gpus if gpu.pci_bus_id}
    return tuple(
        reading if reading.bus_id is None else replace(reading, index=numbers[reading.bus_id])
        for reading in readings
        if reading.bus_id is None or reading.bus_id in numbers
    )


def explain_failure(nvml: Nvml, driver: Driver | None) -> str:
    """Return a warning with the reason why the query failed, its effect and its remedy."""
    effect = "memory and MIG mode of the GPUs are unknown, and the brand except of data-centre parts"
    if driver is None:
        effect = "driver and GPUs are unknown"
    kernel = driver.version if driver else "another version"
    if nvml.error == MISMATCH:
        library = (driver and driver.user_mode) or nvml.library
        return f"NVML {nvidia.describe_mismatch(library, kernel)}; {effect}; {nvidia.RELOAD}"
    if nvml.error == NO_LIBRARY:
        return (
            f"NVML not found (libnvidia-ml.so.1); {effect}; the output of `nvidia-smi -q -x` on such a node "
            f"has the same facts"
        )
    if nvml.error == NOT_LOADED:
        return (
            f"NVML found no driver (error {NOT_LOADED}); {effect}; `nvidia-modprobe` creates its device nodes"
        )
    if nvml.error == NO_PERMISSION:
        return (
            f"NVML cannot open the driver: permission denied (error {NO_PERMISSION}); {effect}; grant access "
            f"to /dev/nvidiactl"
        )
    code = f" (error {nvml.error})" if nvml.error is not None else ""
    return f"NVML query failed{code}: {nvml.message}; {effect}"


def _kill(child: Popen[bytes]) -> None:
    import subprocess

    child.kill()
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
    try:
        child.wait(0.5)
    except subprocess.TimeoutExpired:
        # It hangs in the kernel, cannot be waited for, and ends once the driver returns.
        child.returncode = -9


def _read_gpu(gpu: Fields) -> NvmlGpu:
    from imagematrix.hardware.vendors.gpus import BRANDS

    brand = gpu.get_integer_or_none("brand")
    processes = tuple(
        Process(
            pid=process.get_integer("pid"),
            gpu_instance=process.get_integer_or_none("gpu_instance"),
            compute_instance=process.get_integer_or_none("compute_instance"),
        )
        for process in gpu.list_objects("processes")
    )
    return NvmlGpu(
        index=gpu.get_integer("index"),
        bus_id=pci.normalize_address(gpu.get_text_or_none("bus_id") or ""),
        device_id=gpu.get_text_or_none("device_id"),
        minor=gpu.get_integer_or_none("minor"),
        uuid=gpu.get_text_or_none("uuid"),
        name=gpu.get_text_or_none("name"),
        compute=gpu.get_text_or_none("compute"),
        brand=BRANDS.get(brand) if brand else None,  # 0 is NVML_BRAND_UNKNOWN
        memory_mib=gpu.get_integer_or_none("memory_mib"),
        mig=tuple(_list_mig_devices(gpu)) if gpu.has("mig") else None,
        virtualization=gpu.get_integer_or_none("virtualization"),
        processes=processes if gpu.has("processes") else None,
        memory_used_mib=gpu.get_integer_or_none("memory_used_mib"),
        utilization=gpu.get_integer_or_none("utilization"),
        temperature=gpu.get_integer_or_none("temperature"),
        persistence=gpu.get_integer_or_none("persistence"),
        fabric=gpu.get_integer_or_none("fabric"),
        errors={error.get_text("fact"): error.get_integer("code") for error in gpu.list_objects("errors")},
    )


def _list_mig_devices(gpu: Fields) -> Iterator[MigDevice]:
    for device in gpu.list_objects("mig"):
        gpu_instance, compute_instance = (
            device.get_integer_or_none(key) for key in ("gpu_instance", "compute_instance")
        )
        if gpu_instance is None or compute_instance is None:  # without them, nobody can tell its device nodes
            continue
        yield MigDevice(
            uuid=device.get_text_or_none("uuid"),
            profile=device.get_text_or_none("profile"),
            gpu_instance=gpu_instance,
            compute_instance=compute_instance,
            memory_mib=device.get_integer_or_none("memory_mib"),
        )
