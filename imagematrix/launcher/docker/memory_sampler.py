"""The peak GPU memory of a container, sampled through NVML while it runs."""

from __future__ import annotations

import subprocess
import threading

from imagematrix.common import json_documents
from imagematrix.common.child_modules import make_child_command
from imagematrix.errors import UsageError
from imagematrix.hardware.host import nvml_memory
from imagematrix.launcher.gpu_claims.processes import find_container_ids

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from imagematrix.hardware.host.host import Gpu

EVERY_S = nvml_memory.EVERY_S


class MemorySampler:
    """A thread that samples the memory of a container; `container` returns its id, None until it is known.

    `peaks` maps the device minor of a GPU to the peak in MiB. It is empty if NVML reported nothing.
    """

    def __init__(self, container: Callable[[], str | None]) -> None:
        self.peaks: dict[int, int] = {}
        self._container = container
        self._sampler: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start sampling, if possible."""
        command, quiet = make_child_command("imagematrix.hardware.host.nvml_memory"), subprocess.DEVNULL
        try:
            self._sampler = subprocess.Popen(command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet)
        except OSError:  # a launch needs no measurement
            return
        threading.Thread(target=self._read_samples, args=(self._sampler,), daemon=True).start()

    def stop(self) -> None:
        """Stop sampling."""
        if self._sampler:
            self._sampler.kill()

    def _read_samples(self, sampler: subprocess.Popen[bytes]) -> None:
        with sampler:  # this thread waits for the process, which may never end if it hangs in the driver
            for line in sampler.stdout or ():
                container = self._container()
                if container:
                    self._record_sample(line, container)

    def _record_sample(self, line: bytes, container: str) -> None:
        try:
            sample: Any = json_documents.parse_json(line, "NVML")
        except UsageError:  # the last line, if it was cut off
            return
        for minor, processes in sample:
            sizes = [size for pid, size in processes if size and container in find_container_ids(pid)]
            if sizes:
                self.peaks[minor] = max(self.peaks.get(minor, 0), sum(sizes))


def format_summary(peaks: dict[int, int], gpus: tuple[Gpu, ...]) -> str:
    """Return a sentence with the peaks on `gpus`."""
    by_gpu = {gpu.label: peaks[gpu.minor] for gpu in gpus if gpu.minor in peaks}
    if not by_gpu:
        return "peak GPU memory unknown: NVML did not report the processes of the container"
    sizes = ", ".join(f"{mib} MiB on {label}" for label, mib in by_gpu.items())
    return (
        f"peak GPU memory, sampled every {EVERY_S} s: {sizes}; pass --vram {max(by_gpu.values())}Mi or more"
    )
