"""What NVML, the driver's user-mode library, tells beyond what the kernel does.

It is asked in a process of its own with a time limit: a call into a sick driver may never return, and the
first call on a node without persistence mode takes seconds. Starting that process costs about 40 ms.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from imagematrix.errors import UsageError
from imagematrix.node import pci
from imagematrix.node.host import MigDevice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from subprocess import Popen

    from imagematrix.documents import Fields
    from imagematrix.node.host import Driver

__all__ = ["TIMEOUT_S", "Nvml", "NvmlGpu", "Process", "asking", "decode", "explain", "read"]

TIMEOUT_S = 20.0  # eight GPUs that have to be woken up take about ten

NO_PERMISSION = 4
NOT_LOADED = 9
NO_LIBRARY = 12
MISMATCH = 18
LOST = frozenset({15, 16})  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that computes on a GPU, or on the MIG device that the two instance numbers name."""

    pid: int
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlGpu:
    """What NVML tells of one GPU.

    `index` is NVML's, in PCI bus order. `virtualization` is an nvmlGpuVirtualizationMode_t: 0 none,
    1 passed through, 2 a vGPU in a guest, 3 and 4 a host that gives out vGPUs. `utilization` is in percent,
    `temperature` in degrees Celsius; `persistence` is 0 where the driver lets go of an idle GPU. `fabric` is
    an nvmlGpuFabricState_t: 0 there is none, 1 not started, 2 in progress, 3 completed. `errors` has
    NVML's error code for each fact that it refused; under "handle" for the GPU as a whole.
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
    def reached(self) -> bool:
        """Whether the GPU answered; it may fail as a whole, or with GPU_IS_LOST or RESET_REQUIRED later."""
        return "handle" not in self.errors and LOST.isdisjoint(self.errors.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvml:
    """NVML's answer.

    `message` says why there is none, and is empty where there is one. `error` is NVML's own code for it,
    None where NVML was not reached. `driver` is the version NVML tells, `library` that of its own file.
    """

    error: int | None = None
    message: str = ""
    driver: str | None = None
    library: str | None = None
    gpus: tuple[NvmlGpu, ...] = ()


def read(timeout_s: float = TIMEOUT_S) -> Nvml:
    """Ask NVML, for at most `timeout_s` seconds."""
    import json
    import subprocess
    import sys

    if not sys.executable:
        return Nvml(message="this Python does not know its own program file")
    try:
        child = subprocess.Popen(
            asking("nvml_query"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        return Nvml(message=f"the process that asks it can't be started: {error.strerror}")
    try:
        output, complaint = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _abandon(child)
        return Nvml(message=f"it gave no answer within {timeout_s:g} seconds")
    try:
        return decode(json.loads(output))
    except (ValueError, UsageError):
        last = complaint.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"exit {child.returncode}"]
        return Nvml(message=f"the process that asks it failed: {last[0]}")


def asking(module: str) -> list[str]:
    """Return the command that runs the function main of a module beside this one, in a process of its own.

    It imports from where this process does, be that folders or an archive.
    """
    import os
    import sys

    # "" is the folder where someone happens to stand, with a pynvml.py perhaps that is not the one to run.
    places = [os.path.abspath(place) for place in sys.path if place]  # noqa: PTH100 - strings, not paths
    program = f"import sys; sys.path[:] = {places!r}; from imagematrix.node import {module}; {module}.main()"
    return [sys.executable, "-P", "-c", program]


def decode(document: object) -> Nvml:
    """Return the answer that nvml_query printed; raise UsageError where it is another thing."""
    from imagematrix.documents import Fields

    fields = Fields(document, "NVML")
    version = re.search(r"libnvidia-ml\.so\.(\d+(?:\.\d+)+)$", fields.text_or_none("library") or "")
    return Nvml(
        error=fields.integer_or_none("error"),
        message=fields.text("message"),
        driver=fields.text_or_none("driver"),
        library=version[1] if version else None,
        gpus=tuple(_gpu(gpu) for gpu in fields.objects("gpus")),
    )


def explain(answer: Nvml, driver: Driver | None) -> str:
    """Return the sentence that says why NVML gave no answer, what that means and what would fix it."""
    missing = "so the memory and MIG mode of the GPUs are not known, and the brand of data-centre parts only"
    if driver is None:
        missing = "so nothing tells of the driver and its GPUs"
    kernel = driver.version if driver else "another version"
    if answer.error == MISMATCH:
        return (
            f"NVML refuses (error {MISMATCH}): the user-mode driver on this host is "
            f"{answer.library or 'of another version'} and the kernel module is {kernel}, {missing}; reboot "
            f"or reload the nvidia module to finish the driver upgrade (images bring their own user-mode "
            f"driver, which has to be {kernel})"
        )
    if answer.error == NO_LIBRARY:
        return (
            f"NVML is not installed (no libnvidia-ml.so.1), {missing}; "
            f"the output of `nvidia-smi -q -x` of such a node tells the same"
        )
    if answer.error == NOT_LOADED:
        return (
            f"NVML finds no driver (error {NOT_LOADED}), {missing}; `nvidia-modprobe` makes its device nodes"
        )
    if answer.error == NO_PERMISSION:
        return f"NVML may not open the driver (error {NO_PERMISSION}), {missing}; allow /dev/nvidiactl"
    code = f" (error {answer.error})" if answer.error is not None else ""
    return f"NVML gave no answer{code}: {answer.message}, {missing}"


def _abandon(child: Popen[bytes]) -> None:
    import subprocess

    child.kill()
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
    try:
        child.wait(0.5)
    except subprocess.TimeoutExpired:
        # Stuck inside the kernel: it can't be waited for, and ends when the driver lets go of it.
        child.returncode = -9


def _gpu(gpu: Fields) -> NvmlGpu:
    from imagematrix.facts.gpus import BRANDS

    brand = gpu.integer_or_none("brand")
    return NvmlGpu(
        index=gpu.integer("index"),
        bus_id=pci.canonical(gpu.text_or_none("bus_id") or ""),
        device_id=gpu.text_or_none("device_id"),
        minor=gpu.integer_or_none("minor"),
        uuid=gpu.text_or_none("uuid"),
        name=gpu.text_or_none("name"),
        compute=gpu.text_or_none("compute"),
        brand=BRANDS.get(brand) if brand else None,
        memory_mib=gpu.integer_or_none("memory_mib"),
        mig=tuple(_mig(gpu)) if gpu.present("mig") else None,
        virtualization=gpu.integer_or_none("virtualization"),
        processes=tuple(_process(one) for one in gpu.objects("processes"))
        if gpu.present("processes")
        else None,
        memory_used_mib=gpu.integer_or_none("memory_used_mib"),
        utilization=gpu.integer_or_none("utilization"),
        temperature=gpu.integer_or_none("temperature"),
        persistence=gpu.integer_or_none("persistence"),
        fabric=gpu.integer_or_none("fabric"),
        errors={error.text("fact"): error.integer("code") for error in gpu.objects("errors")},
    )


def _process(process: Fields) -> Process:
    return Process(
        pid=process.integer("pid"),
        gpu_instance=process.integer_or_none("gpu_instance"),
        compute_instance=process.integer_or_none("compute_instance"),
    )


def _mig(gpu: Fields) -> Iterator[MigDevice]:
    for device in gpu.objects("mig"):
        gpu_instance, compute_instance = (
            device.integer_or_none(key) for key in ("gpu_instance", "compute_instance")
        )
        if gpu_instance is None or compute_instance is None:
            continue
        yield MigDevice(
            uuid=device.text_or_none("uuid"),
            profile=device.text_or_none("profile"),
            gpu_instance=gpu_instance,
            compute_instance=compute_instance,
            memory_mib=device.integer_or_none("memory_mib"),
        )
