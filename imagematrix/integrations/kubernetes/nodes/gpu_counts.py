"""How many GPUs a cluster has, how many its pods request, and how many are free: by node and by class.

The numbers come from the API server. Allocatable devices are those that device plugins report as healthy, so
a GPU that is held under another resource name is not free. The GPUs of DRA drivers are counted under the name
of the driver. Use of GPUs outside Kubernetes is not counted.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass

from imagematrix.common.groups import group_values
from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.nodes.dra_usage import count_units, count_waiting, list_claims
from imagematrix.integrations.kubernetes.nodes.nodes import describe_nodes, list_objects

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from imagematrix.common import json_documents
    from imagematrix.integrations.kubernetes.nodes.dra_usage import DraUnits
    from imagematrix.integrations.kubernetes.nodes.nodes import ClusterNode

SCHEMA = "imagematrix.kubernetes-gpus/v1"
OBJECTS = "kubectl get nodes,pods -A -o json"
CLAIMING = "kubectl get nodes,pods,resourceslices,resourceclaims -A -o json"
GPU = re.compile(r"(imagematrix\.io|nvidia\.com)/[-\w.]+|amd\.com/gpu|gpu\.intel\.com/[-\w.]+", re.ASCII)
QUANTITY = re.compile(r"(\d{1,9})([kM]?)", re.ASCII)
FACTORS = {"": 1, "k": 1_000, "M": 1_000_000}  # API servers write 2000 as 2k
ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Numbers of devices of one resource: all, healthy, requested by pods or claims, and free.

    `resource` is the name of a resource, or of a DRA driver.
    """

    resource: str
    capacity: int = 0
    allocatable: int = 0
    requested: int = 0
    free: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(
            resource=self.resource,
            capacity=self.capacity + other.capacity,
            allocatable=self.allocatable + other.allocatable,
            requested=self.requested + other.requested,
            free=self.free + other.free,
        )

    def to_json(self) -> dict[str, object]:
        """Return one element of `resources` in the KubernetesGpus document."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCounts:
    """The counts of a node. If it accepts no pods, because it is cordoned or not ready, nothing is free."""

    name: str
    node_class: str
    schedulable: bool
    counts: tuple[Count, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """The devices of a resource, or of a device class, that unscheduled pods request."""

    resource: str
    pods: int
    requested: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The counts of all nodes, and what unscheduled pods request."""

    nodes: tuple[NodeCounts, ...]
    pending: tuple[Pending, ...]

    @property
    def classes(self) -> dict[str, tuple[int, tuple[Count, ...]]]:
        """The number of nodes and the sums of their counts by class."""
        by_class = group_values((node.node_class, node) for node in self.nodes)
        classes = {}
        for name, nodes in sorted(by_class.items()):
            sums: dict[str, Count] = {}
            for count in (count for node in nodes for count in node.counts):
                resource = count.resource
                sums[resource] = sums.get(resource, Count(resource=resource)) + count
            classes[name] = len(nodes), tuple(sums[resource] for resource in sorted(sums))
        return classes

    def to_json(self) -> dict[str, object]:
        """Return the KubernetesGpus document."""
        return {
            "schema": SCHEMA,
            "nodes": [
                {
                    "name": node.name,
                    "class": node.node_class,
                    "schedulable": node.schedulable,
                    "resources": [count.to_json() for count in node.counts],
                }
                for node in self.nodes
            ],
            "classes": [
                {"name": name, "nodes": nodes, "resources": [count.to_json() for count in sums]}
                for name, (nodes, sums) in self.classes.items()
            ],
            "pending": [asdict(pending) for pending in self.pending],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLists:
    """Objects of a cluster, as its API server writes them. What is of no other kind should be a node."""

    nodes: Sequence[json_documents.Fields]
    pods: Sequence[json_documents.Fields]
    slices: Sequence[json_documents.Fields]
    claims: Sequence[json_documents.Fields]


def count_gpus(lists: Sequence[tuple[object, str]]) -> Cluster:
    """Return the counts of the objects in some lists, each given with its name for messages.

    Raises UsageError if a list is invalid, or if the lists lack what pods request, so that every GPU would
    look free: the only list has no pods, or pods of nodes have claims, and no list has any.
    """
    objects = split_by_kind(lists)
    where = ", ".join(where for _, where in lists)
    if not objects.pods and len(lists) == 1:
        raise UsageError(f"{where}: no pods found", remedy=f"give --pods, or write it with `{OBJECTS}`")
    nodes = describe_nodes(objects.nodes, where)
    fields_by_name = {
        metadata.get_text("name"): item
        for item in objects.nodes
        if (metadata := item.get_object_or_none("metadata"))
    }
    requests = _list_requests(objects.pods)
    has_claims = objects.claims or not objects.slices
    if not has_claims and any(node and any(list_claims(pod)) for pod, node, _ in requests):
        raise UsageError(
            f"{where}: pods have claims, but no claims found", remedy=f"write it with `{CLAIMING}`"
        )
    used = _sum_requests((node, request) for _, node, request in requests)
    units = count_units(objects.slices, objects.claims)
    counts = tuple(
        _count_node(node, fields_by_name[node.name], used.get(node.name, Counter()), units.get(node.name, {}))
        for node in nodes
    )
    unplaced = [(pod, request) for pod, node, request in requests if node is None]
    pending = [*_count_pending([request for _, request in unplaced])]
    waiting = count_waiting((pod for pod, _ in unplaced), objects.claims)
    for name, (pods, devices) in waiting.items():
        pending.append(Pending(resource=name, pods=pods, requested=devices))
    return Cluster(nodes=counts, pending=tuple(pending))


def split_by_kind(lists: Sequence[tuple[object, str]]) -> ClusterLists:
    """Return the objects of some lists by their kinds; raise UsageError if one is invalid."""
    items = (item for data, where in lists for item in list_objects(data, where))
    by_kind = group_values((item.get_text("kind"), item) for item in items)
    pods, slices, claims = (by_kind.pop(kind, []) for kind in ("Pod", "ResourceSlice", "ResourceClaim"))
    nodes = [node for others in by_kind.values() for node in others]
    return ClusterLists(nodes=nodes, pods=pods, slices=slices, claims=claims)


def count_used(pods: Iterable[json_documents.Fields]) -> dict[str, Counter[str]]:
    """Return the GPUs that the pods of each node request, except for pods that have ended."""
    sums = _sum_requests((node, request) for _, node, request in _list_requests(pods))
    return {node: request for node, request in sums.items() if node is not None}


def count_requested(spec: json_documents.Fields) -> Counter[str]:
    """Return the GPUs that the containers of a pod request, as the scheduler counts them.

    Init containers run one after another before the other containers. Those with the restart policy Always
    keep running.
    """
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for container in spec.list_objects("initContainers"):
        request = _count_container(container)
        if container.get_text_or_none("restartPolicy") == "Always":
            running += request
            request = Counter()
        most |= running + request
    for container in spec.list_objects("containers"):
        running += _count_container(container)
    return most | running


def _list_requests(
    pods: Iterable[json_documents.Fields],
) -> list[tuple[json_documents.Fields, str | None, Counter[str]]]:
    """Return each pod that has not ended, its node, None if it waits for one, and the GPUs it requests."""
    requests = []
    for pod in pods:
        spec, status = pod.get_object_or_none("spec"), pod.get_object_or_empty("status")
        if spec is not None and status.get_text_or_none("phase") not in ENDED:
            requests.append((pod, spec.get_text_or_none("nodeName"), count_requested(spec)))
    return requests


def _count_pending(requests: Sequence[Counter[str]]) -> Iterator[Pending]:
    pods = Counter(resource for request in requests for resource in request)
    devices = sum(requests, Counter[str]())
    for resource in sorted(pods):
        yield Pending(resource=resource, pods=pods[resource], requested=devices[resource])


def _sum_requests(requests: Iterable[tuple[str | None, Counter[str]]]) -> dict[str | None, Counter[str]]:
    sums: dict[str | None, Counter[str]] = {}
    for node, request in requests:
        sums.setdefault(node, Counter()).update(request)
    return sums


def _count_container(container: json_documents.Fields) -> Counter[str]:
    resources = container.get_object_or_empty("resources")
    # For extended resources, a limit without a request is the request.
    return Counter(
        select_gpu_quantities(resources.get_text_map("limits"))
        | select_gpu_quantities(resources.get_text_map("requests"))
    )


def _count_node(
    node: ClusterNode,
    fields: json_documents.Fields,
    used: Mapping[str, int],
    units_by_driver: Mapping[str, DraUnits],
) -> NodeCounts:
    status = fields.get_object_or_empty("status")
    capacity = select_gpu_quantities(status.get_text_map("capacity"))
    allocatable = select_gpu_quantities(status.get_text_map("allocatable"))
    schedulable = _is_schedulable(fields, status)
    numbers = {
        resource: Count(
            resource=resource,
            capacity=capacity.get(resource, 0),
            allocatable=allocatable.get(resource, 0),
            requested=used.get(resource, 0),
            # Pods keep devices that have become unhealthy, so that more may be requested than are
            # allocatable.
            free=max(0, allocatable.get(resource, 0) - used.get(resource, 0)) if schedulable else 0,
        )
        for resource in capacity.keys() | allocatable.keys() | used.keys()
    }
    numbers |= {
        driver: Count(
            resource=driver,
            capacity=len(units.known),
            allocatable=len(units.healthy),
            requested=len(units.claimed),
            free=len(units.healthy - units.claimed) if schedulable else 0,
        )
        for driver, units in units_by_driver.items()
    }
    return NodeCounts(
        name=node.name,
        node_class=node.class_name,
        schedulable=schedulable,
        counts=tuple(numbers[resource] for resource in sorted(numbers)),
    )


def _is_schedulable(fields: json_documents.Fields, status: json_documents.Fields) -> bool:
    if fields.get_object_or_empty("spec").get_boolean("unschedulable"):
        return False
    return all(
        condition.get_text_or_none("status") == "True"
        for condition in status.list_objects("conditions")
        if condition.get_text_or_none("type") == "Ready"
    )


def select_gpu_quantities(quantities: Mapping[str, str]) -> dict[str, int]:
    """Return the quantities of GPUs, without zeros: kubelet keeps resources that have no devices any more."""
    selected = {}
    for resource, text in quantities.items():
        match = QUANTITY.fullmatch(text) if GPU.fullmatch(resource) else None
        if match and int(match[1]):
            selected[resource] = int(match[1]) * FACTORS[match[2]]
    return selected
