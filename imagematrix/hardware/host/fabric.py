"""The NVLink fabric of nodes with NVSwitches: CUDA fails on every GPU until the fabric is set up.

See https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.hardware.host.nvml import NvmlGpu
    from imagematrix.hardware.host.tree import Tree

WAITING = {1: "not started", 2: "in progress"}  # nvmlGpuFabricState_t
READY = 3
MANAGER = "nv-fabricmanage"  # nv-fabricmanager, cut to the 15 characters of /proc/PID/comm
KTHREADD = ("/proc/2/comm", "kthreadd")
OF_ROOT = "\nUid:\t0\t"  # in /proc/PID/status, which a captured tree may lack
REMEDY = "systemctl enable --now nvidia-fabricmanager, in the driver's version"


def is_managed(tree: Tree) -> bool | None:
    """Whether the fabric manager runs; None if the node's processes are hidden, as in a container."""
    path, name = KTHREADD  # the second process of every kernel, which a PID namespace and hidepid hide
    if (tree.read_text(path) or "").strip() != name:
        return None
    folders = (f"/proc/{process}" for process in tree.list_names("/proc") if process.isdecimal())
    return any(_is_manager(tree, folder) for folder in folders)


def _is_manager(tree: Tree, folder: str) -> bool:
    """Whether a process is the fabric manager; any user can give a process its name."""
    if (tree.read_text(f"{folder}/comm") or "").strip() != MANAGER:
        return False
    status = tree.read_text(f"{folder}/status")
    return status is None or OF_ROOT in status


def find_fabric_problem(switches: int, gpus: Iterable[NvmlGpu], *, managed: bool | None) -> str | None:
    """Return why CUDA fails on a node with this many NVSwitches; None if no problem is known.

    `gpus` are NVML's readings with the host's numbers (see `nvml.match_readings`), whose fabric state takes
    precedence. Drivers before branch 530 and the GPUs of older NVSwitch nodes report no state, so `managed`
    decides.
    """
    states = {gpu.index: gpu.fabric for gpu in gpus}
    waiting = [f"GPU {index} ({WAITING[state]})" for index, state in states.items() if state in WAITING]
    if waiting:
        return f"NVLink fabric not ready, so CUDA fails with error 802: {', '.join(waiting)}"
    # Unknown (None) is no problem: a container does not see the fabric manager of its node.
    if switches and READY not in states.values() and managed is False:
        return f"{switches} NVSwitches, but no fabric manager running: CUDA fails with error 802"
    return None


def list_fabric_warnings(warnings: Iterable[str]) -> list[str]:
    """Return those of a host's warnings that say why CUDA fails on its GPUs: no state of a GPU does."""
    return [warning for warning in warnings if warning.endswith(REMEDY)]
