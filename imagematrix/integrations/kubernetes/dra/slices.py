"""The GPUs of a node as devices in ResourceSlices, and how those of an API server become these.

A device is a GPU without MIG, or a MIG device, named after its UUID: the claims to which it is allocated name
it, and minors may change when the node starts. Types are those of resource.k8s.io/v1 in k8s.io/api, and
slices change as those of resourceslice.Controller in k8s.io/dynamic-resource-allocation do. Attributes that
NVIDIA's DRA driver has too have its names.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from imagematrix.hardware.gpu_request.choice import list_units
from imagematrix.hardware.vendors import versions
from imagematrix.integrations.kubernetes.nodes import labels
from imagematrix.launcher.docker.devices import has_known_nodes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from imagematrix.common.json_documents import Fields
    from imagematrix.hardware.host.host import Gpu, Host

    Device = dict[str, Any]

API = "resource.k8s.io/v1"
SLICES = f"/apis/{API}/resourceslices"
DRIVER = "gpu.imagematrix.io"
ATTRIBUTES = f'device.attributes["{DRIVER}"]'  # in CEL
GPU, MIG = "gpu", "mig"  # the values of the attribute `type`
ADDRESS = "resource.kubernetes.io/pciBusID"
NODE_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)
IN_SLICE = 128  # ResourceSliceMaxDevices
LONGEST = 64  # characters of an attribute's value
LONGEST_DEVICE, LONGEST_SLICE = 63, 253  # characters of names
PARTS = 3  # numbers in a semantic version


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSlice:
    """A ResourceSlice of this driver and node as the API server has it; `version` is its resource version."""

    name: str
    version: str
    pool: Mapping[str, Any]
    devices: tuple[Any, ...]

    @classmethod
    def parse(cls, item: Fields) -> StoredSlice:
        """Return the slice that an object describes; raise UsageError if it is invalid."""
        metadata, spec = item.get_object_or_none("metadata"), item.get_object_or_none("spec")
        if metadata is None or spec is None:
            raise item.fail("spec", "is missing")
        return cls(
            name=metadata.get_text("name"),
            version=metadata.get_text("resourceVersion"),
            pool=spec.get_object_or_empty("pool").data,
            devices=tuple(device.data for device in spec.list_objects("devices")),
        )

    @property
    def generation(self) -> int:
        """The generation of the pool, 0 if it is invalid."""
        number = self.pool.get("generation")
        return number if type(number) is int else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePlan:
    """The requests that make the slices of a node what they should be, in this order.

    `remove` are names; `update` and `create` are indices of the slices to write, with the pool `generation`.
    """

    generation: int
    remove: tuple[str, ...] = ()
    update: tuple[int, ...] = ()
    create: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether all slices are as they should be."""
        return not (self.remove or self.update or self.create)


def name_devices(host: Host) -> dict[str, Gpu]:
    """Return the GPUs and MIG devices of a host by the names of their devices.

    Those with an unknown UUID are left out, as by the device plugin, and so are those whose device nodes are
    unknown.
    """
    return {
        re.sub(r"[^a-z0-9]+", "-", uuid.lower())[:LONGEST_DEVICE].strip("-"): unit
        for uuid, unit in list_units(host.gpus).items()
        if has_known_nodes(unit)
    }


def make_devices(host: Host, without: Mapping[str, str]) -> tuple[Device, ...]:
    """Return the devices of a host that work, except those in `without`."""
    class_name = labels.make_labels(host)[labels.CLASS]
    devices = []
    for name, unit in name_devices(host).items():
        if unit.usable and name not in without:
            device: Device = {"name": name, "attributes": dict(_make_attributes(host, unit, class_name))}
            if mib := unit.least_memory_mib:
                device["capacity"] = {"memory": {"value": f"{mib}Mi"}}
            devices.append(device)
    return tuple(devices)


def split_devices(devices: Sequence[Device]) -> tuple[tuple[Device, ...], ...]:
    """Return devices in groups that fit into a slice; one empty group if there are none."""
    starts = range(0, max(1, len(devices)), IN_SLICE)
    return tuple(tuple(devices[start : start + IN_SLICE]) for start in starts)


def plan_requests(
    wanted: Sequence[tuple[Device, ...]], observed: Mapping[str, StoredSlice], node: str
) -> SlicePlan:
    """Return the requests that make the observed slices those with the `wanted` devices.

    The generation of the pool is raised whenever that takes more than one update, so that the scheduler does
    not mix slices.
    """
    generation = max((stored.generation for stored in observed.values()), default=0)
    names = [make_slice_name(node, index) for index in range(len(wanted))]
    current = {name: stored for name, stored in observed.items() if name in names}
    pool = _make_pool(node, generation, len(wanted))
    missing = tuple(index for index, name in enumerate(names) if name not in current)
    changed = tuple(
        index
        for index, name in enumerate(names)
        if name in current and (current[name].pool != pool or current[name].devices != wanted[index])
    )
    remove = tuple(sorted(observed.keys() - set(names)))
    if missing or len(changed) > 1:
        generation += 1
        changed = tuple(index for index, name in enumerate(names) if name in current)
    return SlicePlan(generation=generation, remove=remove, update=changed, create=missing)


def make_slice_name(node: str, index: int) -> str:
    """Return the name of a node's slice: the allocator takes slices in the order of their names."""
    name = f"{index:02x}-{DRIVER}-{node}"
    if len(name) <= LONGEST_SLICE:
        return name
    return f"{index:02x}-{DRIVER}-{hashlib.sha256(node.encode()).hexdigest()[:32]}"


def make_slice(
    node: str, uid: str | None, index: int, *, count: int, generation: int, devices: Sequence[Device]
) -> dict[str, Any]:
    """Return a ResourceSlice; if the UID of its Node is given, it is removed with that."""
    owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid, "controller": True}
    return {
        "apiVersion": API,
        "kind": "ResourceSlice",
        "metadata": {"name": make_slice_name(node, index), **({"ownerReferences": [owner]} if uid else {})},
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": _make_pool(node, generation, count),
            "devices": list(devices),
        },
    }


def make_query(node: str) -> dict[str, str]:
    """Return the query for the slices of this driver on a node."""
    return {"fieldSelector": f"spec.driver={DRIVER},spec.nodeName={node}"}


def _make_pool(node: str, generation: int, count: int) -> dict[str, Any]:
    return {"name": node, "generation": generation, "resourceSliceCount": count}


def _make_attributes(host: Host, unit: Gpu, class_name: str) -> Iterator[tuple[str, Device]]:
    """Yield the attributes of a GPU, or of a MIG device and its GPU, except those that are unknown."""
    (device,) = unit.mig or (None,)
    yield "type", {"string": MIG if device else GPU}
    texts = {
        "uuid": device.uuid if device else unit.uuid,
        "parentUUID": unit.uuid if device else None,
        "profile": device.profile if device else None,
        "productName": unit.name,
        "brand": unit.brand,
        "state": unit.state,
        "class": class_name,
        "driver": host.driver.version if host.driver else None,
        "kernelModules": host.driver.kind if host.driver else None,
        "userModeDriver": host.driver.user_mode if host.driver else None,
        ADDRESS: unit.pci_bus_id,
    }
    yield from ((key, {"string": text}) for key, text in texts.items() if text and len(text) <= LONGEST)
    numbers = {
        "index": unit.index,
        "minor": unit.minor,
        "memoryMib": unit.least_memory_mib,
        "lastDriverBranch": unit.last_branch,
    }
    yield from ((key, {"int": number}) for key, number in numbers.items() if number is not None)
    yield "dataCentre", {"bool": unit.data_centre}
    # Versions of Tegra drivers cannot be ordered among others.
    ordered = host.driver.version if host.driver and not versions.is_tegra(host.driver.version) else None
    semantic = {
        "cudaComputeCapability": _make_semantic_version(unit.compute),
        "driverVersion": _make_semantic_version(ordered),
    }
    yield from ((key, {"version": version}) for key, version in semantic.items() if version)


def _make_semantic_version(version: str | None) -> str | None:
    """Return a version as a semantic one, for its order; None if it has more than three numbers."""
    parts = versions.make_sort_key(version) if version else ()
    if not 0 < len(parts) <= PARTS:
        return None
    return ".".join(map(str, (*parts, 0, 0)[:PARTS]))
