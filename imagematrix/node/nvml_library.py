"""Finding NVML's library also where the loader does not look for it."""

from __future__ import annotations

__all__ = ["FOLDERS", "NAME", "load"]

NAME = "libnvidia-ml.so.1"
# Where a node brings its driver's files into a container or a virtual machine as one folder.
FOLDERS = (
    "/usr/local/nvidia/lib64",  # Google's and other sandboxes
    "/usr/local/nvidia/lib",
    "/usr/lib64-nvidia",
    "/usr/lib/wsl/lib",  # WSL 2
    "/run/opengl-driver/lib",  # NixOS
    "/home/kubernetes/bin/nvidia/lib64",  # Container-Optimized OS
)


def load() -> None:
    """Load the library, so that pynvml finds it.

    pynvml asks the loader for it by its name alone, and that finds what is loaded under this name already.
    """
    import ctypes

    for path in (NAME, *(f"{folder}/{NAME}" for folder in FOLDERS)):
        try:
            ctypes.CDLL(path)
        except OSError:
            continue
        return
