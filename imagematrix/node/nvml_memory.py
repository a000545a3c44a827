"""Prints what processes have of each GPU's memory, again and again, until its reader is gone.

Each line is a JSON list with [minor, [[pid, MiB], …]] for each GPU; MiB is null where NVML does not tell.
imagematrix.launcher.measure runs this in a process of its own, because a call into a sick driver may never
return.
"""

from __future__ import annotations

import json
import sys
import time

from imagematrix.node import nvml_library

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["main", "sample"]

MIB = 1024 * 1024
EVERY_S = 0.2


def sample(nvml: Any) -> list[list[Any]]:
    """Return one look at all GPUs through the module `nvml` (pynvml); those that refuse are left out."""
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            found.append([nvml.nvmlDeviceGetMinorNumber(handle), [_process(one) for one in processes]])
        except nvml.NVMLError:
            continue
    return found


def main() -> None:
    """Look and print until nobody reads."""
    import pynvml

    nvml_library.load()
    pynvml.nvmlInit()
    while True:
        try:
            sys.stdout.write(f"{json.dumps(sample(pynvml))}\n")
            sys.stdout.flush()
        except BrokenPipeError:
            return
        time.sleep(EVERY_S)


def _process(process: Any) -> list[int | None]:
    used = process.usedGpuMemory
    return [process.pid, None if used is None else used // MIB]
