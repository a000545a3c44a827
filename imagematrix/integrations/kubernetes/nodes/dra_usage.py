"""The GPUs that DRA drivers publish, and those that ResourceClaims hold: by node and driver.

Types are those of resource.k8s.io/v1 in k8s.io/api. A unit is a device, or all devices with one counter set:
these are partitions of one GPU, so a claim of one of them leaves no whole GPU. Pools that are not a single
node's are left out.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from imagematrix.common.json_documents import Fields

    Pool = tuple[str, str]  # a driver and the name of its pool

DRIVERS = re.compile(r"gpu\.(imagematrix\.io|nvidia\.com|amd\.com|intel\.com)", re.ASCII)
# The classes of devices that these drivers install, such as mig.nvidia.com.
CLASSES = re.compile(rf"(?:gpu|mig|vfio\.gpu){DRIVERS.pattern.removeprefix('gpu')}", re.ASCII)
CLOSING = ("NoSchedule", "NoExecute")  # effects of a taint that keep claims away


@dataclass(frozen=True, slots=True, kw_only=True)
class DraUnits:
    """The GPUs of one driver on a node, by name: all, those that claims may get, those that claims have."""

    known: set[str] = field(default_factory=set)
    healthy: set[str] = field(default_factory=set)
    claimed: set[str] = field(default_factory=set)


def count_units(slices: Sequence[Fields], claims: Iterable[Fields]) -> dict[str, dict[str, DraUnits]]:
    """Return the GPUs in ResourceSlices and allocated claims, by node and driver.

    A claim keeps a GPU that is no longer published. Raises UsageError if an object is invalid.
    """
    by_node: dict[str, dict[str, DraUnits]] = {}
    places: dict[tuple[Pool, str], tuple[str, str]] = {}  # the node and unit of a device
    nodes: dict[Pool, str] = {}
    for spec, pool in _list_current_slices(slices):
        for device in spec.list_objects("devices"):
            node = spec.get_text_or_none("nodeName") or device.get_text_or_none("nodeName")
            if node is None:
                continue
            nodes[pool] = node
            # Partitions of one GPU share a counter set.
            counters = next(device.list_objects("consumesCounters"), None)
            unit = f"counters of {counters.get_text('counterSet')}" if counters else device.get_text("name")
            places[pool, device.get_text("name")] = node, unit
            units = by_node.setdefault(node, {}).setdefault(pool[0], DraUnits())
            units.known.add(unit)
            if not any(taint.get_text("effect") in CLOSING for taint in device.list_objects("taints")):
                units.healthy.add(unit)
    for result in (result for claim in claims for result in get_allocation(claim).list_objects("results")):
        driver = result.get_text("driver")
        # Access for an administrator takes no device from others.
        if not DRIVERS.fullmatch(driver) or result.get_boolean("adminAccess"):
            continue
        pool, device_name = (driver, result.get_text("pool")), result.get_text("device")
        # These drivers name the pool of a node after the node.
        node, unit = places.get((pool, device_name)) or (nodes.get(pool, pool[1]), device_name)
        units = by_node.setdefault(node, {}).setdefault(driver, DraUnits())
        units.known.add(unit)
        units.claimed.add(unit)
    return by_node


def count_waiting(pods: Iterable[Fields], claims: Iterable[Fields]) -> dict[str, tuple[int, int]]:
    """Return what the claims of some pods ask for, of those that have no allocation, by device class.

    These are the numbers of pods and of devices; a request for all devices of a node counts as one.
    """
    requests = {
        _make_key(claim): _count_requested(claim)
        for claim in claims
        if not claim.get_object_or_empty("status").has("allocation")
    }
    pod_counts: Counter[str] = Counter()
    waiting_claims: set[tuple[str, str]] = set()
    for pod in pods:
        pod_claims = {key for key in list_claims(pod) if key in requests}
        pod_counts.update({name for key in pod_claims for name in requests[key]})
        waiting_claims |= pod_claims
    devices = sum((requests[key] for key in waiting_claims), Counter[str]())
    return {name: (pod_counts[name], devices[name]) for name in sorted(pod_counts)}


def list_claims(pod: Fields) -> Iterator[tuple[str, str]]:
    """Yield the namespaces and names of a pod's claims; those from templates are named in its status."""
    namespace, _ = _make_key(pod)
    for part, key in (("spec", "resourceClaims"), ("status", "resourceClaimStatuses")):
        for claim in pod.get_object_or_empty(part).list_objects(key):
            if name := claim.get_text_or_none("resourceClaimName"):
                yield namespace, name


def get_allocation(claim: Fields) -> Fields:
    """Return what the scheduler has allocated to a claim: `results` and `config`, if anything."""
    return (
        claim.get_object_or_empty("status").get_object_or_empty("allocation").get_object_or_empty("devices")
    )


def _list_current_slices(slices: Iterable[Fields]) -> Iterator[tuple[Fields, Pool]]:
    """Yield the specs of slices of GPU drivers with their pools, without those of older generations."""
    specs = []
    newest: dict[Pool, int] = {}
    for item in slices:
        spec = item.get_object_or_none("spec")
        pool = spec.get_object_or_none("pool") if spec else None
        if spec is None or pool is None:
            raise item.fail("spec", "has no pool")
        key, generation = (spec.get_text("driver"), pool.get_text("name")), pool.get_integer("generation")
        if DRIVERS.fullmatch(key[0]):
            specs.append((spec, key, generation))
            newest[key] = max(generation, newest.get(key, generation))
    yield from ((spec, key) for spec, key, generation in specs if generation == newest[key])


def _count_requested(claim: Fields) -> Counter[str]:
    """Return how many devices of each class a claim requests; of alternatives, the first one counts."""
    requested: Counter[str] = Counter()
    for request in claim.get_object_or_empty("spec").get_object_or_empty("devices").list_objects("requests"):
        first = request.get_object_or_none("exactly") or next(request.list_objects("firstAvailable"), None)
        name = first.get_text("deviceClassName") if first else ""
        if first and CLASSES.fullmatch(name):
            requested[name] += first.get_integer_or_none("count") or 1
    return requested


def _make_key(item: Fields) -> tuple[str, str]:
    metadata = item.get_object_or_none("metadata")
    if metadata is None:
        raise item.fail("metadata", "is missing (expected an object)")
    return metadata.get_text_or_none("namespace") or "", metadata.get_text("name")
