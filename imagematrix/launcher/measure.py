"""The most memory that a container had on its GPUs while it ran, by many looks through NVML."""

from __future__ import annotations

import subprocess
import threading

from imagematrix import documents
from imagematrix.allocation.processes import container_ids
from imagematrix.errors import UsageError
from imagematrix.node import nvml_memory
from imagematrix.node.nvml import asking

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from imagematrix.node.host import Gpu

__all__ = ["EVERY_S", "Measure", "told"]

EVERY_S = nvml_memory.EVERY_S


class Measure:
    """A thread that looks at the memory of the container that `container` names, once it is known.

    `peaks` has the most MiB at one time by the GPU's device minor. It is empty where NVML told nothing.
    """

    def __init__(self, container: Callable[[], str | None]) -> None:
        self.peaks: dict[int, int] = {}
        self._container = container
        self._looking: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to look, if that can be."""
        command, quiet = asking("nvml_memory"), subprocess.DEVNULL
        try:
            self._looking = subprocess.Popen(command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet)
        except OSError:
            return
        threading.Thread(target=self._look, args=(self._looking,), daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        if self._looking:
            self._looking.kill()

    def _look(self, looking: subprocess.Popen[bytes]) -> None:
        with looking:  # in this thread: who is stuck inside the driver can't be waited for
            for line in looking.stdout or ():
                container = self._container()
                if container:
                    self._take(line, container)

    def _take(self, line: bytes, container: str) -> None:
        try:
            sample: Any = documents.parse(line, "NVML")
        except UsageError:  # the last line, if it was cut off
            return
        for minor, processes in sample:
            sizes = [size for pid, size in processes if size and container in container_ids(pid)]
            if sizes:
                self.peaks[minor] = max(self.peaks.get(minor, 0), sum(sizes))


def told(peaks: dict[int, int], gpus: tuple[Gpu, ...]) -> str:
    """Return what to say of the peaks on `gpus`."""
    known = {gpu.label: peaks[gpu.minor] for gpu in gpus if gpu.minor in peaks}
    if not known:
        return "the GPU memory of the run is not known: NVML told nothing of its processes"
    listed = ", ".join(f"{mib} MiB on {label}" for label, mib in known.items())
    return (
        f"peak GPU memory, seen every {EVERY_S} s: {listed}; ask for --vram {max(known.values())}Mi or more"
    )
