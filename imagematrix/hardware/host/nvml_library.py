"""Loading NVML's library, including from folders that the loader does not search."""

from __future__ import annotations

NAME = "libnvidia-ml.so.1"
# Folders in which nodes mount the driver's files into a container or a virtual machine.
FOLDERS = (
    "/usr/local/nvidia/lib64",  # Google's and other sandboxes
    "/usr/local/nvidia/lib",
    "/usr/lib64-nvidia",
    "/usr/lib/wsl/lib",  # WSL 2
    "/run/opengl-driver/lib",  # NixOS
    "/home/kubernetes/bin/nvidia/lib64",  # Container-Optimized OS
)


def load_library() -> None:
    """Load the library, so that pynvml finds it.

    pynvml loads the library by name, and the loader returns one that is already loaded under this name.
    """
    import ctypes

    for path in (NAME, *(f"{folder}/{NAME}" for folder in FOLDERS)):
        try:
            ctypes.CDLL(path)
        except OSError:
            continue
        return
