"""The devices that a node offers to kubelet, and what a container gets: pure functions of a Host.

A unit is what gets allocated: a GPU without MIG, or a MIG device. Several resources may offer the same unit,
and kubelet counts them separately. So a unit that is held under one resource is unhealthy under all others. A
unit that is used outside of pods is unhealthy under all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from imagematrix.common.groups import group_values
from imagematrix.errors import ImagematrixError
from imagematrix.hardware.gpu_request.choice import get_memory_mib, list_units, merge_gpus
from imagematrix.hardware.gpu_request.spec import GPUS_VARIABLE
from imagematrix.integrations.kubernetes.nodes import labels
from imagematrix.launcher.docker.devices import has_known_nodes, list_device_nodes
from imagematrix.launcher.docker.share import Share
from imagematrix.launcher.gpu_claims.pods import GIB, SHARE, VRAM, parse_uuids
from imagematrix.launcher.gpu_claims.usage import find_consumers, list_lock_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from imagematrix.hardware.host.host import Gpu, Host
    from imagematrix.launcher.gpu_claims.usage import Usage

GPU = f"{labels.PREFIX}gpu"
MIG = f"{labels.PREFIX}mig-"
CLASS = f"{labels.PREFIX}class-"
KINDS = ("product", "class")
MAKER = re.compile(r"^(?:nvidia|tesla)\s+", re.IGNORECASE)
PROCESS = "process"  # a kind of consumer
LONGEST = 63  # characters of a resource's name after its prefix


class AllocationError(ImagematrixError):
    """Devices that kubelet chose cannot be given to a container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOffer:
    """What a node offers: its units by name, and for each resource a map of device ids to units."""

    host: Host
    units: Mapping[str, Gpu]
    resources: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What a container gets: the paths of device nodes, and environment variables."""

    devices: tuple[str, ...]
    environment: Mapping[str, str]


def make_offer(host: Host, *, by: Iterable[str] = (), vram: bool = False) -> DeviceOffer:
    """Return what a host offers.

    GPUs are offered as imagematrix.io/gpu, MIG devices as imagematrix.io/mig-PROFILE. With "product" in `by`,
    a GPU is also offered under the name of its product, with "class" under the class of the node; with
    `vram`, each GiB of a unit's memory is offered too. A unit with an unknown UUID is not offered: once a
    probe finds the UUID, it would look like a second, free unit.
    """
    units = list_units(host.gpus)
    kinds = frozenset(by)
    resources: dict[str, dict[str, str]] = {}
    for name, unit in units.items():
        if unit.mig is not None:
            (device,) = unit.mig
            names = [_make_resource_name(MIG, device.profile or labels.UNKNOWN)]
        else:
            names = [GPU]
            if "product" in kinds and unit.name:
                names.append(_make_resource_name(f"{GPU}-", MAKER.sub("", unit.name)))
            if "class" in kinds:
                names.append(_make_resource_name(CLASS, labels.make_labels(host)[labels.CLASS]))
        for resource in names:
            resources.setdefault(resource, {})[name] = name
    shares = {}
    for name, unit in units.items() if vram else ():
        for index in range((get_memory_mib(unit) or 0) // GIB):
            shares[f"{name}{SHARE}{index}"] = name
    return DeviceOffer(host=host, units=units, resources=resources | ({VRAM: shares} if shares else {}))


def find_users(offer: DeviceOffer, usage: Usage, holders: Mapping[str, str]) -> dict[str, str]:
    """Return the units that are used outside of pods, each with its users.

    `usage` is that of this node without its pods, `holders` maps a unit to the resource under which it is
    held. Processes on a unit that is held may be those of the pod.
    """
    by_unit = {
        name: [
            consumer
            for consumer in find_consumers(usage, list_lock_names(unit))
            if name not in holders or consumer.kind != PROCESS
        ]
        for name, unit in offer.units.items()
        if unit.minor is not None
    }
    return {name: ", ".join(map(str, consumers)) for name, consumers in by_unit.items() if consumers}


def list_devices(
    offer: DeviceOffer, resource: str, holders: Mapping[str, str], used: Mapping[str, str]
) -> tuple[tuple[str, bool], ...]:
    """Return the device ids of a resource, each with whether it is healthy: whether it can be allocated.

    `holders` maps a unit to the resource under which it is held, `used` is as `find_users` returns it. A
    resource that is not offered any more has no devices.
    """
    return tuple(
        (
            device,
            offer.units[unit].usable
            and has_known_nodes(offer.units[unit])
            and holders.get(unit, resource) == resource
            and unit not in used,
        )
        for device, unit in offer.resources.get(resource, {}).items()
    )


def allocate_devices(
    offer: DeviceOffer,
    resource: str,
    devices: Sequence[str],
    holders: Mapping[str, str],
    used: Mapping[str, str],
) -> Allocation:
    """Return what a container gets for the device ids that kubelet chose.

    `holders` and `used` are as for `list_devices`. Raises AllocationError if one cannot be used, is held
    under another resource or used outside of pods, or if shares would span units; UsageError if a share is
    too small for CUDA itself.
    """
    units = find_held_units(offer, devices)
    if unknown := [device for device in devices if device not in offer.resources.get(resource, {})]:
        raise AllocationError(f"{resource}: device {unknown[0][:80]!r} not found")
    for unit in units:
        if not offer.units[unit].usable:
            raise AllocationError(f"{unit} cannot be used: {offer.units[unit].state}")
        if holders.get(unit, resource) != resource:
            raise AllocationError(f"{unit} is in use as {holders[unit]}")
        if unit in used:
            raise AllocationError(f"{unit} is in use by {used[unit]}")
    vram = resource == VRAM
    if vram and len(units) > 1:
        raise AllocationError(
            f"{len(devices)} GiB would span {len(units)} GPUs: none has that much memory left",
            remedy="request less, or whole GPUs",
        )
    gpus = merge_gpus(offer.units[unit] for unit in units)
    share = Share(vram_mib=len(devices) * GIB if vram else None)
    return Allocation(
        devices=list_device_nodes(offer.host, gpus),
        environment={GPUS_VARIABLE: ",".join(units), **share.environment(gpus)},
    )


def choose_preferred(
    offer: DeviceOffer, resource: str, available: Sequence[str], required: Sequence[str], count: int
) -> tuple[str, ...]:
    """Return `count` of the `available` device ids, with all `required` ones; none if there are too few.

    All shares come from one unit: of those with enough left, the one with the least, so that whole GPUs stay
    free.
    """
    units = offer.resources.get(resource, {})
    groups = group_values((units[device], device) for device in available if device in units)
    enough = [group for group in groups.values() if len(group) >= count and set(required) <= set(group)]
    if not enough:
        return ()
    group = min(enough, key=len)
    rest = [device for device in group if device not in required]
    return (*required, *rest)[:count]


def find_held_units(offer: DeviceOffer, devices: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the units that device ids belong to, without duplicates.

    The ids may be of a resource that is not offered any more, or of NVIDIA's device plugin, whose ids are
    UUIDs too.
    """
    return tuple(uuid for uuid in parse_uuids(devices) if uuid in offer.units)


def _make_resource_name(prefix: str, word: str) -> str:
    """Return the name of a resource: letters, digits, dashes and dots after its prefix."""
    longest = LONGEST - len(prefix.removeprefix(labels.PREFIX))
    name = re.sub(r"[^a-z0-9.]+", "-", word.lower())[:longest].strip("-.")
    return prefix + (name or labels.UNKNOWN)
