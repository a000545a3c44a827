"""Usage of GPUs by running containers, however they were started, from the engine's descriptions of them."""

from __future__ import annotations

import os
import re
import stat

from imagematrix.allocation.processes import MAJOR
from imagematrix.allocation.shares import parse_mib
from imagematrix.allocation.usage import Consumer, combined, keys, mig_key
from imagematrix.node.pci import canonical

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from imagematrix.allocation.usage import Usage
    from imagematrix.node.host import Gpu

__all__ = ["CDI", "GPUS", "LEASE", "VISIBLE", "VRAM", "WHOLE", "gpu_keys", "is_nvidia", "usage"]

# Labels: VRAM is the share of each GPU that a container declares, in MiB or WHOLE; LEASE is the lease under
# which it was started. A launch always sets VRAM, so that a label of the image never takes effect.
VRAM = "io.imagematrix.vram"
WHOLE = "whole"
LEASE = "io.imagematrix.lease"
GPUS = "io.imagematrix.gpus"  # the names of the GPUs of a launch

ALL = "all"
CONTROL = 254  # the minors from here on belong to nvidia-modeset and nvidiactl
NVIDIA = "nvidia"
VISIBLE = "NVIDIA_VISIBLE_DEVICES="
CDI = re.compile(r"(?:[\w-]+\.)*nvidia\.com/[\w.-]+=", re.ASCII)  # before a device's own name in CDI
NODE = re.compile(r"/dev/nvidia(\d+)", re.ASCII)
NUMBERED = re.compile(r"c\s+195:(\d+|\*)(\s.*)?", re.ASCII)  # a devices cgroup rule for GPU nodes
CAPABILITY = re.compile(r"/dev/nvidia-caps/nvidia-cap(\d+)", re.ASCII)
# The number of a GPU, or of a MIG device on a GPU; early CDI specifications name them gpu0 and mig0:1.
NUMBER = re.compile(r"(?:gpu|mig)?(\d{1,4})(:\d{1,4})?", re.ASCII)
PREFIXES = ("gpu-", "mig-")  # of UUIDs in lower case


def usage(containers: Iterable[Mapping[str, Any]], gpus: tuple[Gpu, ...]) -> Usage:
    """Return the usage of `gpus` by `containers`, each as `imagematrix.engine.running` returns it.

    A container uses the GPUs whose device nodes it has, and the GPUs that it requests from NVIDIA's runtime:
    with `--gpus`, through CDI, or by the variable that this runtime reads. A privileged container does not
    count as a user: it could use all GPUs, but seldom uses one. With the label VRAM a container uses a share
    of each GPU; if the label is not a number of MiB, it uses the whole GPU.
    """
    return combined(
        *(dict.fromkeys(gpu_keys(container, gpus), (_consumer(container),)) for container in containers)
    )


def gpu_keys(container: Mapping[str, Any], gpus: tuple[Gpu, ...]) -> list[str]:
    """Return the keys of the GPUs that one container has, including GPUs that are not in `gpus`."""
    return sorted({*_nodes(container, gpus), *_injected(container, gpus)})


def is_nvidia(runtime: str | None) -> bool:
    """Whether a runtime is NVIDIA's by its name: the toolkit also installs nvidia-cdi and nvidia-legacy."""
    return (runtime or "").startswith(NVIDIA)


def _consumer(container: Mapping[str, Any]) -> Consumer:
    config = container.get("Config") or {}
    labels = config.get("Labels") or {}
    number = str(container.get("Id") or "")
    name = str(container.get("Name") or number).lstrip("/")
    return Consumer(
        kind="container",
        name=f"{name} ({config.get('Image')})",
        vram_mib=parse_mib(str(labels.get(VRAM))),
        marks=frozenset(filter(None, (number, labels.get(LEASE)))),
    )


def _nodes(container: Mapping[str, Any], gpus: tuple[Gpu, ...]) -> set[str]:
    host = container.get("HostConfig") or {}
    paths = [str(device.get("PathOnHost")) for device in host.get("Devices") or ()]
    numbers = [
        match[1] for rule in host.get("DeviceCgroupRules") or () if (match := NUMBERED.fullmatch(rule))
    ]
    minors = {minor for path in paths if (minor := _minor(path)) is not None}
    minors |= {int(number) for number in numbers if number != "*"}
    # For a folder the engine passes all device nodes in it.
    if "*" in numbers or any(os.path.normpath(path) == "/dev" for path in paths):
        minors |= {gpu.minor for gpu in gpus if gpu.minor is not None}
    passed = {int(match[1]) for path in paths if (match := CAPABILITY.fullmatch(path))}
    instances = {
        (gpu.minor, device.gpu_instance, device.compute_instance)
        for gpu in gpus
        for device in gpu.mig or ()
        if gpu.minor is not None and device.capabilities and passed.issuperset(device.capabilities)
    }
    # A container with a MIG device also has the node of its GPU, which alone grants no access.
    whole = minors - {minor for minor, _, _ in instances}
    return {f"nvidia{minor}" for minor in whole} | {mig_key(*instance) for instance in instances}


def _minor(path: str) -> int | None:
    """Return the minor of the GPU whose device node is `path`, whatever its name; None for other paths."""
    match = NODE.fullmatch(path)
    if match:
        return int(match[1])
    try:
        node = os.stat(path)  # noqa: PTH116 - pathlib is slow to import
    except (OSError, ValueError):
        return None
    minor = os.minor(node.st_rdev)
    is_gpu = stat.S_ISCHR(node.st_mode) and os.major(node.st_rdev) == MAJOR and minor < CONTROL
    return minor if is_gpu else None


def _injected(container: Mapping[str, Any], gpus: tuple[Gpu, ...]) -> Iterator[str]:
    host, config = container.get("HostConfig") or {}, container.get("Config") or {}
    names: list[str] = []
    for request in host.get("DeviceRequests") or ():
        names += _requested(request)
    if is_nvidia(host.get("Runtime")):
        values = [value for value in config.get("Env") or () if str(value).startswith(VISIBLE)]
        names += values[-1].removeprefix(VISIBLE).split(",") if values else []
    plain = {CDI.sub("", name.strip(), count=1).lower() for name in names}
    for gpu, numbers in _numbered(gpus):
        for name in plain:
            yield from _named(gpu, numbers, name)


def _requested(request: Mapping[str, Any]) -> list[str]:
    """Return the names of the GPUs in one device request of a container.

    The engine turns a count of N into the first N indices, and -1 into "all" (daemon/nvidia_linux.go).
    """
    ids = [str(name) for name in request.get("DeviceIDs") or ()]
    driver, capabilities = request.get("Driver") or "", request.get("Capabilities") or ()
    if driver not in ("", "nvidia", "cdi") or (
        driver == "" and not any("gpu" in alternative for alternative in capabilities)
    ):
        return []
    count = int(request.get("Count") or 0)
    return ids + ([ALL] if count < 0 else [str(index) for index in range(count)])


def _numbered(gpus: tuple[Gpu, ...]) -> Iterator[tuple[Gpu, range]]:
    """Yield the GPUs that have a device node, each with the numbers that NVIDIA's runtime may use for it.

    The runtime does not count GPUs without the nvidia module, and counts only some of those that do not work.
    """
    working = 0
    for place, gpu in enumerate(gpu for gpu in gpus if gpu.minor is not None):
        yield gpu, range(working, place + 1)
        working += gpu.usable


def _named(gpu: Gpu, numbers: range, name: str) -> tuple[str, ...]:
    """Return the keys of the devices of `gpu` that `name`, in lower case, refers to.

    Names are read as by the runtime (src/cli/common.c of libnvidia-container). "0:1" is the second MIG device
    of GPU 0; the order of MIG devices is unknown here, so it refers to the whole GPU. The start of a UUID is
    a name, too.
    """
    number = NUMBER.fullmatch(name)
    if number:
        if int(number[1]) not in numbers:
            return ()
        return (f"nvidia{gpu.minor}",) if number[2] else keys(gpu)
    address = canonical(name)
    if name == ALL or _is_named(gpu.uuid, name) or (address and address == canonical(gpu.pci_bus_id or "")):
        return keys(gpu)
    devices = [device for device in gpu.mig or () if _is_named(device.uuid, name)]
    return tuple(mig_key(gpu.minor or 0, device.gpu_instance, device.compute_instance) for device in devices)


def _is_named(uuid: str | None, name: str) -> bool:
    return uuid is not None and name.startswith(PREFIXES) and uuid.lower().startswith(name)
