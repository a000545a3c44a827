"""The device nodes that a container needs for its GPUs, and whether they work on this machine.

Sources: the README of NVIDIA's driver ("Accessing the GPU device files") and the MIG user guide ("Device
nodes and capabilities").
"""

from __future__ import annotations

import errno
import os
import stat

from imagematrix.common.record import Record
from imagematrix.errors import ProbeError
from imagematrix.hardware.host import device

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.hardware.host.host import Gpu, Host

# CUDA needs the first two for every GPU; the others serve debuggers and profilers, and graphics.
ALWAYS = ("/dev/nvidiactl", "/dev/nvidia-uvm")
WHERE_PRESENT = ("/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")

PERMISSION = "grant this user access: through the node's group, a udev rule, or the devices cgroup"
NO_DRIVER = "load the driver (`modprobe nvidia`), and check the kernel log for errors of the GPU"


class DeviceProblem(Record):
    """A device node that cannot be passed to a container: `what` is wrong with it, and the remedy.

    It is a `doubt` if only this user may not open it: the engine, which runs as another user, may.
    """

    path: str
    what: str
    remedy: str
    doubt: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


class DevicesError(ProbeError):
    """Device nodes that a launch needs are missing or cannot be opened; `problems` lists them."""

    def __init__(self, problems: tuple[DeviceProblem, ...]) -> None:
        super().__init__(
            "; ".join(map(str, problems)),
            remedy="; ".join(dict.fromkeys(problem.remedy for problem in problems)),
        )
        self.problems = problems


def has_known_nodes(gpu: Gpu) -> bool:
    """Whether `list_device_nodes` can name the device nodes of a GPU, and of its MIG devices."""
    return gpu.minor is not None and all(part.capabilities is not None for part in gpu.mig or ())


def list_device_nodes(host: Host, gpus: Iterable[Gpu]) -> tuple[str, ...]:
    """Return the device nodes to pass for `gpus` of `host`, in a fixed order; none without GPUs.

    A GPU's node is named by its minor number, not by its index. Raises ProbeError if a number is unknown.
    """
    paths = []
    for gpu in gpus:
        if gpu.minor is None:
            raise ProbeError(
                f"device minor of {gpu.label} unknown: cannot determine its node",
                remedy="load the driver, which writes the minor to /proc/driver/nvidia/gpus/*/information",
            )
        paths.append(f"/dev/nvidia{gpu.minor}")
        for part in gpu.mig or ():
            if part.capabilities is None:
                folder = f"/proc/driver/nvidia/capabilities/gpu{gpu.minor}/mig/gi{part.gpu_instance}"
                raise ProbeError(
                    f"device nodes of a MIG device of {gpu.label} unknown: the probe did not find {folder}",
                    remedy="probe the node again with driver loaded and MIG enabled, "
                    "or pass a GPU without MIG",
                )
            paths += [f"{device.CAPABILITY}{minor}" for minor in part.capabilities]
    if not paths:
        return ()
    present = [path for path in WHERE_PRESENT if path in host.devices]
    return tuple(dict.fromkeys([*paths, *ALWAYS, *present]))


def check_device_nodes(paths: Iterable[str], root: str = "/") -> tuple[DeviceProblem, ...]:
    """Return the problems of device nodes.

    Existence proves nothing: each must be a character device with a driver attached, and this user must have
    access. The node of a GPU is checked without opening it (see imagematrix.hardware.host.device).
    """
    problems = []
    for path in paths:
        node = f"{root.rstrip('/')}{path}"
        try:
            if not stat.S_ISCHR(os.stat(node).st_mode):  # noqa: PTH116 - pathlib is slow to import
                remedy = f"remove it; {device.explain_creation(path)}"
                problems.append(DeviceProblem(path=path, what="not a character device", remedy=remedy))
            elif path.removeprefix("/dev/nvidia").isdigit():
                device.require_device(node)
            else:
                # Opening these wakes no GPU. Capabilities are only ever read.
                access = os.O_RDONLY if path.startswith(device.CAPABILITY) else os.O_RDWR
                os.close(os.open(node, access | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            problems.append(_describe_problem(path, error))
    return tuple(problems)


def find_absent_nodes(paths: Iterable[str]) -> tuple[DeviceProblem, ...]:
    """Return the problems of missing device nodes."""
    return tuple(
        DeviceProblem(path=path, what="not found", remedy=device.explain_creation(path)) for path in paths
    )


def require_device_nodes(paths: Iterable[str], root: str = "/") -> tuple[DeviceProblem, ...]:
    """Return the doubts about device nodes; raise DevicesError if one cannot be used."""
    problems = check_device_nodes(paths, root)
    if not all(problem.doubt for problem in problems):
        raise DevicesError(problems)
    return problems


def _describe_problem(path: str, error: OSError) -> DeviceProblem:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return find_absent_nodes([path])[0]
    if error.errno in (errno.EACCES, errno.EPERM):
        # If root is denied, the file mode is not the reason, and an engine that runs as root is denied too.
        doubt = os.geteuid() != 0
        return DeviceProblem(path=path, what="permission denied", remedy=PERMISSION, doubt=doubt)
    if error.errno in (errno.ENXIO, errno.ENODEV):
        return DeviceProblem(path=path, what="no driver attached", remedy=NO_DRIVER)
    return DeviceProblem(path=path, what=f"cannot open: {error.strerror}", remedy=NO_DRIVER)
