"""A part of a GPU: what a container is told of its share, and how it joins NVIDIA's MPS.

MPS (Multi-Process Service) lets processes of several containers compute on a GPU at the same time, through a
daemon of the node: https://docs.nvidia.com/deploy/mps/.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from imagematrix.errors import ProbeError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.node.host import Gpu

__all__ = ["Mps", "Share", "mps"]

PIPES = "CUDA_MPS_PIPE_DIRECTORY"
USUAL_PIPES = "/tmp/nvidia-mps"  # noqa: S108 - NVIDIA's default
# What CUDA takes before a program has allocated anything: 200 to 500 MB, by Coding Sans, "GPU orchestration
# using Docker" (codingsans.com/blog/gpu-orchestration-using-docker).
CONTEXT_MIB = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Mps:
    """A running MPS daemon: the folder of its pipes, its user, and the part of each GPU's threads to ask for.

    `threads` is in percent, None for all. Only a daemon of root serves the users of all containers.
    """

    pipes: str = USUAL_PIPES
    user: int = 0
    threads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a container gets of each of its GPUs: memory in MiB, None for all, and MPS if it joins that."""

    vram_mib: int | None = None
    mps: Mps | None = None

    def environment(self, gpus: tuple[Gpu, ...]) -> dict[str, str]:
        """Return the variables that tell the container of its share of `gpus`.

        Raises UsageError where the share has no room for CUDA itself.
        """
        found: dict[str, str] = {}
        if self.vram_mib is not None and gpus:
            found |= _memory(self.vram_mib, gpus)
        if self.mps is not None and gpus:
            found |= {PIPES: self.mps.pipes}
            if self.vram_mib is not None:
                limits = (f"{number}={self.vram_mib}M" for number in range(len(gpus)))
                found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(limits)
            if self.mps.threads is not None:
                found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(self.mps.threads)
        return found


def mps(environment: Mapping[str, str], threads: int | None = None) -> Mps:
    """Return the MPS daemon of this node; raise ProbeError where none runs, or not for this user."""
    pipes = environment.get(PIPES) or USUAL_PIPES
    control = os.path.join(pipes, "control")  # noqa: PTH118 - pathlib is slow to import
    try:
        found = os.stat(control)  # noqa: PTH116 - see above
    except OSError as error:
        raise ProbeError(
            f"no MPS daemon is there: {control}: {error.strerror}",
            remedy=f"start it: `nvidia-cuda-mps-control -d`, or name the folder of its pipes in {PIPES}",
        ) from error
    if not stat.S_ISFIFO(found.st_mode):
        raise ProbeError(f"{control} is no pipe of an MPS daemon", remedy=f"name the folder in {PIPES}")
    return Mps(pipes=pipes, user=found.st_uid, threads=threads)


def _memory(vram_mib: int, gpus: tuple[Gpu, ...]) -> dict[str, str]:
    if vram_mib <= CONTEXT_MIB:
        raise UsageError(
            f"a share of {vram_mib} MiB leaves a program nothing: CUDA takes up to {CONTEXT_MIB} MiB itself",
            remedy="ask for more with --vram; --measure tells what a run took",
        )
    totals = [size for gpu in gpus for size in _sizes(gpu)]
    if totals and vram_mib > min(totals):
        raise UsageError(f"a share of {vram_mib} MiB is more than a GPU has: {min(totals)} MiB")
    # Of unlike GPUs the largest: so the program keeps to its share on all of them.
    fraction = (vram_mib - CONTEXT_MIB) / max(totals) if totals else None
    told = {} if fraction is None else {"IMAGEMATRIX_VRAM_FRACTION": _rounded_down(fraction)}
    return {"IMAGEMATRIX_VRAM_MIB": str(vram_mib), **told}


def _rounded_down(fraction: float) -> str:
    """Return at least four digits, and as many as there have to be for two that count."""
    digits = next(number for number in range(4, 12) if fraction * 10**number >= 10)  # noqa: PLR2004 - two digits
    return f"{int(fraction * 10**digits) / 10**digits:.{digits}f}"


def _sizes(gpu: Gpu) -> tuple[int, ...]:
    sizes = [device.memory_mib for device in gpu.mig] if gpu.mig else [gpu.memory_mib]
    return tuple(size for size in sizes if size)
