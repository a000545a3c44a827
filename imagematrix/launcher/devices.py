"""The device nodes that a container needs for its GPUs, and whether this machine has them.

The driver's nodes are named in NVIDIA's README ("Accessing the GPU device files"), those of MIG in its MIG
user guide ("Device nodes and capabilities").
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

from imagematrix.errors import ProbeError
from imagematrix.node import device

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.node.host import Gpu, Host

__all__ = ["DevicesError", "Problem", "absent", "check", "nodes", "require"]

ALWAYS = ("/dev/nvidiactl", "/dev/nvidia-uvm")
WHERE_PRESENT = ("/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
CAPABILITY = "/dev/nvidia-caps/nvidia-cap"

APPEAR = {
    "/dev/nvidiactl": "load the driver and make the node: `modprobe nvidia`, `nvidia-modprobe -c 255`",
    "/dev/nvidia-uvm": "load the module and make the node: `nvidia-modprobe -u -c 0`",
    "/dev/nvidia-uvm-tools": "load the module and make the node: `nvidia-modprobe -u -c 0`",
    "/dev/nvidia-modeset": "load the module and make the node: `nvidia-modprobe -m`",
}
PERMISSION = "allow it to this user: by the group that owns the node, a udev rule, or the devices cgroup"
UNANSWERED = "load the driver (`modprobe nvidia`), and see the kernel's log for what it says about the GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A device node that cannot be passed to a container: what is wrong with it, and what would cure that.

    It is a `doubt` where only this user may not open it: the engine, which is another, may all the same.
    """

    path: str
    what: str
    remedy: str
    doubt: bool = False


class DevicesError(ProbeError):
    """Device nodes that a launch needs are missing or cannot be opened; `problems` has each of them."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__(
            "; ".join(f"{problem.path} {problem.what}" for problem in problems),
            remedy="; ".join(dict.fromkeys(problem.remedy for problem in problems)),
        )
        self.problems = problems


def nodes(host: Host, gpus: Iterable[Gpu]) -> tuple[str, ...]:
    """Return the device nodes to pass for `gpus` of `host`, in a fixed order; none for no GPU.

    A GPU's node bears its minor number, which is not its index. Raises ProbeError where a number is unknown.
    """
    own = [node for gpu in gpus for node in _own(gpu)]
    if not own:
        return ()
    present = [path for path in WHERE_PRESENT if path in host.devices]
    return tuple(dict.fromkeys([*own, *ALWAYS, *present]))


def check(paths: Iterable[str], root: str = "/") -> tuple[Problem, ...]:
    """Return what keeps device nodes from being used.

    That a node is there proves nothing: each must be a character device with a driver behind it that may be
    opened. The node of a GPU is not opened for that (see imagematrix.node.device).
    """
    return tuple(problem for path in paths for problem in _problems(path, _under(root, path)))


def absent(paths: Iterable[str]) -> tuple[Problem, ...]:
    """Return the problems of device nodes that are not there."""
    return tuple(Problem(path=path, what="is not there", remedy=_appear(path)) for path in paths)


def require(paths: Iterable[str], root: str = "/") -> tuple[Problem, ...]:
    """Return the doubts about device nodes; raise DevicesError where one of them cannot be used."""
    problems = check(paths, root)
    if not all(problem.doubt for problem in problems):
        raise DevicesError(problems)
    return problems


def _own(gpu: Gpu) -> Iterator[str]:
    if gpu.minor is None:
        raise ProbeError(
            f"the device minor of {gpu.label} is unknown, and so is its node",
            remedy="it is in /proc/driver/nvidia/gpus/*/information once the driver is loaded",
        )
    yield f"/dev/nvidia{gpu.minor}"
    for part in gpu.mig or ():
        if part.capabilities is None:
            folder = f"/proc/driver/nvidia/capabilities/gpu{gpu.minor}/mig/gi{part.gpu_instance}"
            raise ProbeError(
                f"the nodes of a MIG device of {gpu.label} are unknown: its probe has found no {folder}",
                remedy="probe the node again, with its driver loaded and MIG on; or pass a GPU without MIG",
            )
        for number in part.capabilities:
            yield f"{CAPABILITY}{number}"


def _problems(path: str, real: str) -> Iterator[Problem]:
    try:
        kind = os.stat(real).st_mode  # noqa: PTH116 - pathlib is slow to import
    except OSError as error:
        yield _problem(path, error)
        return
    if not stat.S_ISCHR(kind):
        yield Problem(path=path, what="is no character device", remedy=f"remove it; {_appear(path)}")
        return
    try:
        if path.removeprefix("/dev/nvidia").isdigit():
            device.require(real)
        else:
            # No GPU is behind these. Capabilities are only ever read.
            access = os.O_RDONLY if path.startswith(CAPABILITY) else os.O_RDWR
            os.close(os.open(real, access | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        yield _problem(path, error)


def _problem(path: str, error: OSError) -> Problem:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return absent([path])[0]
    if error.errno in (errno.EACCES, errno.EPERM):
        # Root is kept from it by more than its mode, and so is an engine that runs as root.
        doubt = os.geteuid() != 0
        return Problem(path=path, what="may not be opened by this user", remedy=PERMISSION, doubt=doubt)
    if error.errno in (errno.ENXIO, errno.ENODEV):
        return Problem(path=path, what="has no driver behind it", remedy=UNANSWERED)
    return Problem(path=path, what=f"cannot be opened: {error.strerror}", remedy=UNANSWERED)


def _appear(path: str) -> str:
    if path in APPEAR:
        return APPEAR[path]
    if path.startswith(CAPABILITY):
        return "make the node: `nvidia-modprobe -f` with its file under /proc/driver/nvidia/capabilities"
    minor = path.removeprefix("/dev/nvidia")
    return f"load the driver and make the node: `modprobe nvidia`, `nvidia-modprobe -c {minor}`"


def _under(root: str, path: str) -> str:
    return f"{root.rstrip('/')}{path}"
