"""Usage of GPUs by running containers, however they were started, from the devices that each was given."""

from __future__ import annotations

import contextlib
import os
import re
import stat

from imagematrix.hardware.gpu_request.choice import list_mig_devices, name_mig_device
from imagematrix.hardware.host.pci import normalize_address
from imagematrix.launcher.gpu_claims.processes import MAJOR
from imagematrix.launcher.gpu_claims.shares import parse_mib
from imagematrix.launcher.gpu_claims.usage import Consumer, format_mig_key, list_lock_names, merge_usages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.hardware.host.host import Gpu
    from imagematrix.images.engine.containers import PassedDevices, RunningContainer
    from imagematrix.launcher.gpu_claims.usage import Usage

# Labels: VRAM is the share of each GPU that a container declares, in MiB or WHOLE; LEASE is the lease under
# which it was started. A launch always sets VRAM, so that a label of the image never takes effect.
VRAM = "io.imagematrix.vram"
WHOLE = "whole"
LEASE = "io.imagematrix.lease"
GPUS = "io.imagematrix.gpus"  # the names of the GPUs of a launch

ALL = "all"
CONTROL = 254  # the minors from here on belong to nvidia-modeset and nvidiactl
CDI_KIND = "imagematrix.io/gpu"  # of the CDI devices that `export cdi` writes, by the names of `--gpus`
CDI = re.compile(r"(?:[\w-]+\.)*nvidia\.com/[\w.-]+=", re.ASCII)  # before a device's own name in CDI
NODE = re.compile(r"/dev/nvidia(\d+)", re.ASCII)
RULE = re.compile(r"([abc])\s+(\d+|\*):(\d+|\*)(?:\s+([rwm]+))?", re.ASCII)  # of the devices cgroup
CAPABILITIES = "/dev/nvidia-caps/nvidia-cap"
CAPABILITY = re.compile(rf"{CAPABILITIES}(\d+)", re.ASCII)
# The index of a GPU, or of a MIG device on a GPU; early CDI specifications name them gpu0 and mig0:1.
INDEX = re.compile(r"(?:gpu|mig)?(\d{1,4})(:\d{1,4})?", re.ASCII)
PREFIXES = ("gpu-", "mig-")  # of UUIDs in lower case


def compute_container_usage(containers: Iterable[RunningContainer], gpus: tuple[Gpu, ...]) -> Usage:
    """Return the usage of `gpus` by `containers`.

    A container uses the GPUs whose device nodes it has or may open by a rule of its devices cgroup, and those
    that it requests from NVIDIA's runtime: with `--gpus`, through CDI, or by the variable that this runtime
    reads. A privileged container does not count as a user: it could use all GPUs, but seldom uses any. With
    the label VRAM a container uses a share of each GPU; if the label is not a number of MiB, it uses the
    whole GPU.
    """
    usages = []
    for container in containers:
        labels = container.labels
        consumer = Consumer(
            kind="container",
            name=f"{container.name} ({container.image})",
            vram_mib=parse_mib(str(labels.get(VRAM))),
            owner_ids=frozenset(filter(None, (container.container_id, labels.get(LEASE)))),
        )
        usages.append(dict.fromkeys(find_gpu_keys(container.devices, gpus), (consumer,)))
    return merge_usages(*usages)


def find_gpu_keys(devices: PassedDevices, gpus: tuple[Gpu, ...]) -> list[str]:
    """Return the keys of the GPUs that are passed to a container, including GPUs that are not in `gpus`."""
    return sorted({*_find_keys_by_nodes(devices, gpus), *_find_keys_by_request(devices.requested, gpus)})


def _find_keys_by_nodes(devices: PassedDevices, gpus: tuple[Gpu, ...]) -> set[str]:
    """Return the keys of the GPUs whose device nodes a container has, or may open by a rule of its cgroup."""
    paths = [path for device in devices.paths for path in _list_passed_nodes(device, gpus)]
    rules = list(_parse_rules(devices.cgroup_rules))
    minors = {minor for path in paths if (minor := _parse_minor(path)) is not None}
    numbered = [(int(major), int(minor)) for _, major, minor in rules if "*" not in (major, minor)]
    # A rule by number may open a GPU that `gpus` does not have.
    minors |= {minor for major, minor in numbered if major == MAJOR}
    passed = {int(match[1]) for path in paths if (match := CAPABILITY.fullmatch(path))}
    if rules:
        opened = [path for path in _list_known_nodes(gpus) if any(_is_covered(path, rule) for rule in rules)]
        minors |= {minor for path in opened if (minor := _parse_minor(path)) is not None}
        passed |= {int(match[1]) for path in opened if (match := CAPABILITY.fullmatch(path))}
    instances = {
        (gpu.minor, device.gpu_instance, device.compute_instance)
        for gpu in gpus
        for device in gpu.mig or ()
        if gpu.minor is not None and device.capabilities and passed.issuperset(device.capabilities)
    }
    # A container with a MIG device also has the node of its GPU, which alone grants no access.
    whole = minors - {minor for minor, _, _ in instances}
    return {f"nvidia{minor}" for minor in whole} | {
        format_mig_key(*instance) for instance in instances if instance[0] in minors
    }


def _list_known_nodes(gpus: tuple[Gpu, ...]) -> tuple[str, ...]:
    """Return the device nodes of `gpus` and of their MIG devices."""
    return tuple(
        dict.fromkeys(
            path
            for gpu in gpus
            if gpu.minor is not None
            for path in (
                f"/dev/nvidia{gpu.minor}",
                *(
                    f"{CAPABILITIES}{minor}"
                    for device in gpu.mig or ()
                    for minor in device.capabilities or ()
                ),
            )
        )
    )


def list_known_nodes_below(path: str, gpus: tuple[Gpu, ...]) -> list[str]:
    """Return the device nodes of `gpus` at a path or in a folder, also through links."""
    real = os.path.realpath(path)
    return [node for node in _list_known_nodes(gpus) if f"{node}/".startswith(f"{real.rstrip('/')}/")]


def _list_passed_nodes(device: str, gpus: tuple[Gpu, ...]) -> Iterator[str]:
    """Yield the device nodes that `--device` passes: for a folder the engine passes all nodes in it."""
    # The engine resolves links, too, before it passes a node (oci/devices_linux.go of moby).
    path = os.path.realpath(f"/{device.lstrip('/')}")
    yield path
    inside = [node for node in _list_known_nodes(gpus) if node.startswith(f"{path.rstrip('/')}/")]
    yield from inside
    if not inside and os.path.isdir(path):  # noqa: PTH112 - pathlib is slow to import
        yield from (f"{folder}/{name}" for folder, _, names in os.walk(path) for name in names)


def _parse_rules(texts: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield kind, major and minor of the rules by which a container may read or write character devices."""
    for text in texts:
        match = RULE.fullmatch(text)
        if match and match[1] != "b" and (match[4] is None or {"r", "w"}.intersection(match[4])):
            yield match[1], match[2], match[3]


def _is_covered(path: str, rule: tuple[str, str, str]) -> bool:
    """Whether a rule of the devices cgroup covers the node at `path`, which the container can create itself.

    A GPU has its device number even if there is no node here.
    """
    kind, major, minor = rule
    if kind == "a":  # runc takes it for every device, whatever its numbers
        return True
    name = NODE.fullmatch(path) or CAPABILITY.fullmatch(path)
    numbers = {(MAJOR if NODE.fullmatch(path) else None, int(name[1]) if name else None)}
    with contextlib.suppress(OSError):
        device = os.stat(path).st_rdev  # noqa: PTH116 - see above
        numbers.add((os.major(device), os.minor(device)))
    return any(
        (major == "*" or int(major) == node_major) and (minor == "*" or int(minor) == node_minor)
        for node_major, node_minor in numbers
    )


def _parse_minor(path: str) -> int | None:
    """Return the minor of the GPU whose device node is `path`, whatever its name; None for other paths."""
    match = NODE.fullmatch(path)
    if match:
        return int(match[1])
    try:
        return read_minor(os.stat(path))  # noqa: PTH116 - see above
    except (OSError, ValueError):  # no file has this name here
        return None


def read_minor(node: os.stat_result) -> int | None:
    """Return the minor of the GPU whose device node this is, None if it is another file."""
    minor = os.minor(node.st_rdev)
    is_gpu = stat.S_ISCHR(node.st_mode) and os.major(node.st_rdev) == MAJOR and minor < CONTROL
    return minor if is_gpu else None


def _find_keys_by_request(names: tuple[str, ...], gpus: tuple[Gpu, ...]) -> Iterator[str]:
    """Yield the keys of the GPUs that NVIDIA's runtime, or the engine through CDI, adds for these names."""
    our_names = {name.partition("=")[2] for name in names if name.startswith(f"{CDI_KIND}=")}
    runtime_names = {CDI.sub("", name.strip(), count=1).lower() for name in names}
    # NVIDIA's runtime does not count GPUs without the nvidia module, and counts only some of those that do
    # not work. So a GPU may have any of these indices.
    working = 0
    for position, gpu in enumerate(gpu for gpu in gpus if gpu.minor is not None):
        indices = range(working, position + 1)
        working += gpu.usable
        for name in runtime_names:
            yield from _find_keys_by_name(gpu, indices, name)
        if not our_names.isdisjoint((ALL, str(gpu.index), gpu.uuid)):
            yield from list_lock_names(gpu)
        for part in list_mig_devices(gpu) if our_names else ():
            (device,) = part.mig or ()
            if not our_names.isdisjoint((name_mig_device(gpu, device), device.uuid)):
                yield from list_lock_names(part)


def _find_keys_by_name(gpu: Gpu, indices: range, name: str) -> tuple[str, ...]:
    """Return the keys of the devices of `gpu` that `name`, in lower case, refers to.

    Names are read as by the runtime (src/cli/common.c of libnvidia-container). "0:1" is the second MIG device
    of GPU 0; the order of MIG devices is unknown here, so it refers to the whole GPU. The start of a UUID is
    a name, too.
    """
    match = INDEX.fullmatch(name)
    if match:
        if int(match[1]) not in indices:
            return ()
        return (f"nvidia{gpu.minor}",) if match[2] else list_lock_names(gpu)
    address = normalize_address(name)
    if (
        name == ALL
        or _is_named(gpu.uuid, name)
        or (address and address == normalize_address(gpu.pci_bus_id or ""))
    ):
        return list_lock_names(gpu)
    devices = [device for device in gpu.mig or () if _is_named(device.uuid, name)]
    return tuple(
        format_mig_key(gpu.minor or 0, device.gpu_instance, device.compute_instance) for device in devices
    )


def _is_named(uuid: str | None, name: str) -> bool:
    return uuid is not None and name.startswith(PREFIXES) and uuid.lower().startswith(name)
