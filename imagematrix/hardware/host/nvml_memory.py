"""Prints samples of the GPU memory of processes until the reader closes the pipe.

Each line is a JSON list with [minor, [[pid, MiB], …]] for each GPU; MiB is null if NVML does not report it.
imagematrix.launcher.docker.memory_sampler runs this in a separate process, because a call into a faulty
driver may never return.
"""

from __future__ import annotations

import json
import sys
import time

from imagematrix.hardware.host import nvml_library

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MIB = 1024 * 1024
EVERY_S = 0.2


def read_sample(nvml: Any) -> list[list[Any]]:
    """Return one sample of all GPUs through the module `nvml` (pynvml); GPUs with errors are left out."""
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            minor = nvml.nvmlDeviceGetMinorNumber(handle)
            used = [(process.pid, process.usedGpuMemory) for process in processes]
            gpus.append([minor, [[pid, None if size is None else size // MIB] for pid, size in used]])
        except nvml.NVMLError:
            continue
    return gpus


def main() -> None:
    """Print samples until the reader closes the pipe."""
    import pynvml

    nvml_library.load_library()
    pynvml.nvmlInit()
    while True:
        try:
            sys.stdout.write(f"{json.dumps(read_sample(pynvml))}\n")
            sys.stdout.flush()
        except BrokenPipeError:
            return
        time.sleep(EVERY_S)
