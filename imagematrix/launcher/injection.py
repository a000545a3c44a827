"""Drivers that come from the node: through CDI or NVIDIA's runtime.

An image without a driver needs that; into one that has a driver it would bring a second.
"""

from __future__ import annotations

import os
from dataclasses import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any

    from imagematrix.launcher.options import Words
    from imagematrix.launcher.plan import Launch

__all__ = ["second_driver", "through_cdi"]

KIND = "nvidia.com/gpu"
RUNTIME = "nvidia"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
NOTHING = ("", "void", "none")  # with "none" the runtime still brings the driver, but no GPU to use it with


def through_cdi(launch: Launch, folders: Iterable[str]) -> Launch:
    """Return `launch` with its injected GPUs as CDI devices, or as it is where not all of them are such.

    `folders` are those in which the engine looks for CDI specifications (`CDISpecDirs` of `docker info`). See
    https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md.
    """
    there = {name for folder in folders for name in _devices(folder)}
    indices = [str(gpu.index) for gpu in launch.gpus]
    for found in (launch.injected, tuple(indices)):
        if found and there.issuperset(found):
            return replace(launch, injected=tuple(f"{KIND}={name}" for name in found), cdi=True)
    return launch


def second_driver(words: Words, info: Callable[[], Mapping[str, Any]]) -> str | None:
    """Return what would bring the node's driver into an image that has its own, or None.

    `words` are the user's; `info` is what the engine tells of itself, asked only where that matters.
    """
    if any(name.startswith(f"{KIND}=") for name in words.values("--device")):
        return f"--device {KIND}=…"
    given = [value.partition("=")[2] for value in words.values("--env", "e") if _names(value, VISIBLE)]
    visible = given[-1] if given else ""
    if visible in NOTHING:
        return None
    runtime = ["", *words.values("--runtime")][-1]
    if (runtime or info().get("DefaultRuntime")) != RUNTIME:
        return None
    return f"{VISIBLE}={visible} with the runtime {RUNTIME}"


def _names(text: str, variable: str) -> bool:
    return text.partition("=")[0] == variable and "=" in text


def _devices(folder: str) -> Iterator[str]:
    """Yield the names of NVIDIA's devices in the CDI specifications in a folder."""
    import yaml

    try:
        files = sorted(os.listdir(folder))  # noqa: PTH208 - this way it is one error for all
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
            yield from (str(one.get("name")) for one in spec.get("devices") or () if isinstance(one, dict))
