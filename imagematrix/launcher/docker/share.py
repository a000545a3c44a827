"""A share of a GPU: the variables that describe it to a container, and the connection to NVIDIA's MPS.

MPS (Multi-Process Service) is a daemon with which processes of several containers compute on a GPU at the
same time: https://docs.nvidia.com/deploy/mps/.
"""

from __future__ import annotations

import _socket  # the core of `socket`, which takes longer to import
import os
import struct

from imagematrix.common.record import Record
from imagematrix.errors import ProbeError, UsageError
from imagematrix.launcher.gpu_claims.processes import describe_process
from imagematrix.launcher.gpu_claims.shares import MPS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.hardware.host.host import Gpu

PIPES = "CUDA_MPS_PIPE_DIRECTORY"
USUAL_PIPES = "/tmp/nvidia-mps"  # noqa: S108 - NVIDIA's default
# The memory that CUDA and its libraries use beside a program's data. On an H100 with driver 580.159.04, they
# took 518 MiB in a program without libraries, and from 610 to 750 MiB with PyTorch 2.11 for CUDA 13.0.
CONTEXT_MIB = 800


class Mps(Record):
    """A running MPS daemon: the folder of its pipes, its user, and the threads to request of each GPU.

    `threads` is in percent, None for all. Only a daemon that runs as root serves containers of all users.
    """

    pipes: str = USUAL_PIPES
    user: int = 0
    threads: int | None = None


class Share(Record):
    """A container's share of each of its GPUs: memory in MiB, None for all, and its MPS daemon, if any."""

    vram_mib: int | None = None
    mps: Mps | None = None

    def environment(self, gpus: tuple[Gpu, ...]) -> dict[str, str]:
        """Return the variables that describe the share of `gpus` to the container.

        Raises UsageError if the share is too small for CUDA itself.
        """
        variables: dict[str, str] = {}
        if self.vram_mib is not None and gpus:
            require_minimum(self.vram_mib)
            variables["IMAGEMATRIX_VRAM_MIB"] = str(self.vram_mib)
            totals = [
                size
                for gpu in gpus
                for size in ([device.memory_mib for device in gpu.mig] if gpu.mig else [gpu.memory_mib])
                if size
            ]
            if totals and self.vram_mib > min(totals):
                raise UsageError(
                    f"share of {self.vram_mib} MiB exceeds the memory of a GPU: {min(totals)} MiB"
                )
            if totals:
                # The largest GPU counts, so that the program stays within its share on every GPU.
                fraction = (self.vram_mib - CONTEXT_MIB) / max(totals)
                # Rounded down to at least four decimals, and to enough for two significant digits.
                digits = next(count for count in range(4, 12) if fraction * 10**count >= 10)  # noqa: PLR2004
                rounded = int(fraction * 10**digits) / 10**digits
                variables["IMAGEMATRIX_VRAM_FRACTION"] = f"{rounded:.{digits}f}"
        if self.mps is not None and gpus:
            variables |= {PIPES: self.mps.pipes}
            if self.vram_mib is not None:
                # By the numbers in the container, which CUDA counts from 0.
                limits = (f"{index}={self.vram_mib}M" for index in range(len(gpus)))
                variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(limits)
            if self.mps.threads is not None:
                variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(self.mps.threads)
        return variables


def find_mps(environment: Mapping[str, str], threads: int | None = None) -> Mps:
    """Return the MPS daemon of this node; raise ProbeError if none runs, or not for this user.

    The daemon listens on the socket `control` in the folder of its pipes.
    """
    pipes = environment.get(PIPES) or USUAL_PIPES
    control = os.path.join(pipes, "control")  # noqa: PTH118 - pathlib is slow to import
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        connection.connect(control)
        pid, user, _ = struct.unpack("3i", connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12))
    except OSError as error:
        raise ProbeError(
            f"MPS daemon not found: {control}: {error.strerror or error}",
            remedy=f"start it with `nvidia-cuda-mps-control -d`, or set {PIPES} to the folder of its pipes",
        ) from error
    finally:
        connection.close()
    # The process id is 0 if the daemon is outside this PID namespace.
    if pid and describe_process(pid).name not in {MPS, "unknown"}:
        raise ProbeError(
            f"{control} belongs to {describe_process(pid)}, which is no MPS daemon",
            remedy=f"set {PIPES} to the folder of the daemon's pipes",
        )
    return Mps(pipes=pipes, user=user, threads=threads)


def require_minimum(vram_mib: int) -> None:
    """Raise UsageError if a share is too small for CUDA itself."""
    if vram_mib <= CONTEXT_MIB:
        raise UsageError(
            f"share of {vram_mib} MiB too small: CUDA itself takes up to {CONTEXT_MIB} MiB",
            remedy="pass a larger --vram; --measure reports what a run used",
        )
