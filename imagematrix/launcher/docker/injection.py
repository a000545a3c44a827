"""Injection of the node's driver, through CDI or NVIDIA's runtime.

An image without a driver needs it. An image with a driver would get a second driver.
"""

from __future__ import annotations

import json
import os
import re

from imagematrix.common.record import replace
from imagematrix.hardware.vendors.runtime import VISIBLE, is_nvidia
from imagematrix.launcher.docker.plan import NO_INJECTION
from imagematrix.launcher.docker.user_gpu_options import expand_variable
from imagematrix.launcher.gpu_claims.containers import CDI

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any

    from imagematrix.launcher.docker.options import RunArgs
    from imagematrix.launcher.docker.plan import Launch

KIND = "nvidia.com/gpu"
NODE = re.compile(r"/dev/nvidia(?:\d+|-caps/.+)", re.ASCII)  # of a GPU, or of a MIG device
NOTHING = ("", "void", "none")  # with "none" the runtime still injects the driver, but no GPU to use it with


def inject_through_cdi(launch: Launch, folders: Iterable[str]) -> Launch:
    """Return `launch` with its injected GPUs as CDI devices, or unchanged if CDI does not list all of them.

    `folders` are the engine's folders of CDI specifications (`CDISpecDirs` of `docker info`). See
    https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md. If specifications name devices
    by number instead of UUID, a device is identified by its device nodes, because these numbers count only
    the GPUs that worked when the specifications were written.
    """
    specified = {name: nodes for folder in folders for name, nodes in _read_cdi_devices(folder)}
    by_node = {nodes: name for name, nodes in specified.items()}
    # A MIG device has the node of its GPU, too, so nodes identify only whole GPUs.
    numbers = [by_node.get(frozenset([f"/dev/nvidia{gpu.minor}"]), "") for gpu in launch.gpus if not gpu.mig]
    for names in (launch.injected, numbers if len(numbers) == len(launch.gpus) else ()):
        if names and specified.keys() >= set(names):
            through_cdi = replace(launch, injected=tuple(f"{KIND}={name}" for name in names), cdi=True)
            # The engine adds them, without NVIDIA's runtime.
            return through_cdi.with_environment(NO_INJECTION)
    return launch


def find_second_driver(args: RunArgs, info: Callable[[], Mapping[str, Any]]) -> str | None:
    """Return the option that would inject the node's driver into an image that has its own, or None.

    `info` returns the engine's information, and is called only if needed.
    """
    for name in args.get_values("--device"):
        if CDI.match(name):
            return f"--device {name}"
    values = [
        expand_variable(text) for text in args.get_values("--env", "e") if text.partition("=")[0] == VISIBLE
    ]
    visible = values[-1] if values else ""
    if visible in NOTHING:
        return None
    runtime = ["", *args.get_values("--runtime")][-1]
    runtime = runtime or str(info().get("DefaultRuntime"))
    return f"{VISIBLE}={visible} with the runtime {runtime}" if is_nvidia(runtime, info) else None


def _read_cdi_devices(folder: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield NVIDIA's devices in the CDI specifications in a folder: their names and device nodes of GPUs."""
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
                # YAML includes JSON, but its reader is slow, and far slower if brackets are deeply nested.
                spec = json.load(opened) if file.endswith(".json") else yaml.safe_load(opened)
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            continue
        if isinstance(spec, dict) and spec.get("kind") == KIND:
            for device in _iterate_objects(spec.get("devices")):
                edits = _iterate_objects([device.get("containerEdits")])
                nodes = (
                    str(node.get("path"))
                    for edit in edits
                    for node in _iterate_objects(edit.get("deviceNodes"))
                )
                yield str(device.get("name")), frozenset(filter(NODE.fullmatch, nodes))


def _iterate_objects(items: object) -> Iterator[Mapping[str, object]]:
    yield from (item for item in items if isinstance(item, dict)) if isinstance(items, list) else ()
