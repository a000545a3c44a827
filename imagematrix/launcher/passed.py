"""The GPUs that the user's own options for `docker run` pass to a container: they are asked for as well."""

from __future__ import annotations

import os
from dataclasses import dataclass

from imagematrix.allocation.containers import CDI_KIND, VISIBLE, gpu_keys
from imagematrix.allocation.usage import keys
from imagematrix.node.host import Gpu
from imagematrix.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from imagematrix.launcher.options import Words

__all__ = ["Passed", "passed", "passed_by"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """GPUs that a container gets by options of the user's own; `named` where these name them one by one.

    A privileged container has all of them, and no list of devices that says so.
    """

    gpus: tuple[Gpu, ...] = ()
    named: bool = False


def passed(words: Words, gpus: tuple[Gpu, ...], info: Callable[[], Mapping[str, Any]]) -> Passed:
    """Return those of `gpus`, and others, that the options in `words` pass.

    `info` is what the engine tells of itself, asked only where that matters. A volume with /dev in it passes
    none: the devices cgroup keeps the container from opening them.
    """
    if words.privileged:
        return Passed(gpus=_all(gpus))
    devices = words.values("--device")
    names = [name for name in devices if name.startswith(CDI_KIND)]
    visible = [_value(text) for text in words.values("--env", "e") if text.partition("=")[0] == VISIBLE[:-1]]
    host = {
        "Devices": [{"PathOnHost": name.partition(":")[0]} for name in devices if name not in names],
        "DeviceCgroupRules": words.values("--device-cgroup-rule"),
        "DeviceRequests": [{"Driver": "cdi", "DeviceIDs": names}],
        "Runtime": (words.values("--runtime") or (info().get("DefaultRuntime") if visible else "",))[-1],
    }
    found = _had(host, [f"{VISIBLE}{value}" for value in visible], gpus)
    return Passed(gpus=found, named=bool(found))


def passed_by(options: Mapping[str, Any], gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Return those of `gpus`, and others, that options of docker-py's `containers.create` pass."""
    if options.get("privileged"):
        return _all(gpus)
    host = {
        "Devices": [{"PathOnHost": str(name).partition(":")[0]} for name in options.get("devices") or ()],
        "DeviceCgroupRules": options.get("device_cgroup_rules"),
        "DeviceRequests": options.get("device_requests"),
        "Runtime": options.get("runtime"),
    }
    given = options.get("environment") or ()
    pairs = [f"{name}={value}" for name, value in given.items()] if isinstance(given, dict) else list(given)
    return _had(host, pairs, gpus)


def _all(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    return tuple(gpu for gpu in gpus if gpu.minor is not None)


def _had(host: Mapping[str, Any], environment: list[str], gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    container = {"HostConfig": host, "Config": {"Env": environment}}
    return tuple(_gpu(key, gpus) for key in gpu_keys(container, gpus))


def _gpu(key: str, gpus: tuple[Gpu, ...]) -> Gpu:
    """Return the GPU, or the GPU with its only MIG device, that goes by `key`."""
    for gpu in gpus:
        parts = [replace(gpu, mig=(device,)) for device in gpu.mig or ()]
        for one in (replace(gpu, mig=None), *parts) if gpu.minor is not None else ():
            if keys(one) == (key,):
                return gpu if one.mig is None else one
    minor = int(key.removeprefix("nvidia").partition("-")[0])
    return Gpu(index=minor, minor=minor)


def _value(text: str) -> str:
    name, given, value = text.partition("=")
    return value if given else os.environ.get(name, "")
