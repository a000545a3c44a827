"""Injection of the node's driver, through CDI or NVIDIA's runtime.

An image without a driver needs it; an image with a driver would get a second one.
"""

from __future__ import annotations

import os

from imagematrix.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any

    from imagematrix.launcher.options import RunArgs
    from imagematrix.launcher.plan import Launch

__all__ = ["second_driver", "through_cdi"]

KIND = "nvidia.com/gpu"
RUNTIME = "nvidia"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
NOTHING = ("", "void", "none")  # with "none" the runtime still injects the driver, but no GPU to use it with


def through_cdi(launch: Launch, folders: Iterable[str]) -> Launch:
    """Return `launch` with its injected GPUs as CDI devices, or unchanged if CDI does not list all of them.

    `folders` are those in which the engine looks for CDI specifications (`CDISpecDirs` of `docker info`). See
    https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md.
    """
    specified = {name for folder in folders for name in _devices(folder)}
    indices = [str(gpu.index) for gpu in launch.gpus]
    for names in (launch.injected, tuple(indices)):
        if names and specified.issuperset(names):
            return replace(launch, injected=tuple(f"{KIND}={name}" for name in names), cdi=True)
    return launch


def second_driver(args: RunArgs, info: Callable[[], Mapping[str, Any]]) -> str | None:
    """Return the option that would inject the node's driver into an image that has its own, or None.

    `info` returns the engine's information, and is called only where needed.
    """
    if any(name.startswith(f"{KIND}=") for name in args.values("--device")):
        return f"--device {KIND}=…"
    values = [value.partition("=")[2] for value in args.values("--env", "e") if _sets(value, VISIBLE)]
    visible = values[-1] if values else ""
    if visible in NOTHING:
        return None
    runtime = ["", *args.values("--runtime")][-1]
    if (runtime or info().get("DefaultRuntime")) != RUNTIME:
        return None
    return f"{VISIBLE}={visible} with the runtime {RUNTIME}"


def _sets(text: str, variable: str) -> bool:
    return text.partition("=")[0] == variable and "=" in text


def _devices(folder: str) -> Iterator[str]:
    """Yield the names of NVIDIA's devices in the CDI specifications in a folder."""
    import yaml

    try:
        files = sorted(os.listdir(folder))  # noqa: PTH208 - it raises at once, not while iterating
    except OSError:
        return
    for file in files:
        if not file.endswith((".json", ".yaml")):
            continue
        try:
            with open(f"{folder}/{file}", encoding="utf-8") as opened:  # noqa: PTH123 - see above
                spec = yaml.safe_load(opened)
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            continue
        if isinstance(spec, dict) and spec.get("kind") == KIND:
            devices = spec.get("devices") or ()
            yield from (str(device.get("name")) for device in devices if isinstance(device, dict))
