"""NVIDIA's container runtime, which adds GPUs and the node's driver to containers, and how they ask for it.

The runtime reads a variable from the environment of the container, so from the image too, unless a launch
sets it. Sources: internal/config/image of nvidia-container-toolkit; enroot's hook 98-nvidia.sh reads it
likewise; daemon/nvidia_linux.go of Moby for the capabilities.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

VISIBLE = "NVIDIA_VISIBLE_DEVICES"
VOID = "void"  # the container stays as it is; with "none" it gets the driver, but no GPU
NVIDIA = "nvidia"  # the name of the runtime, and the beginning of its other names and of its program's
PLAIN = frozenset({"", "runc", "crun", "oci", "io.containerd.runc.v2"})  # names that engines give to others
# Any of these in a request for devices selects the engine's driver for NVIDIA's GPUs.
CAPABILITIES = frozenset(
    {"gpu", NVIDIA, "compute", "compat32", "graphics", "utility", "video", "display", "ngx"}
)


def requests_gpus(environment: Mapping[str, str]) -> bool:
    """Whether an environment asks the runtime for GPUs or for the node's driver."""
    return environment.get(VISIBLE, "") not in ("", VOID)


def is_nvidia(name: str | None, info: Callable[[], Mapping[str, Any]]) -> bool:
    """Whether the engine's runtime `name` is NVIDIA's: by its name, or by the program behind the name.

    The toolkit also installs nvidia-cdi and nvidia-legacy; an administrator can choose any name. `info`
    returns the engine's information, and is called only for such a name.
    """
    if (name or "").startswith(NVIDIA):
        return True
    if (name or "") in PLAIN:
        return False
    return NVIDIA in str((info().get("Runtimes") or {}).get(name)).lower()
