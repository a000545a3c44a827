"""Nodes of a cluster, as `kubectl get nodes -o json` writes them, and the Hosts that their labels describe.

Our own labels contain every fact that a selection reads. Nodes without them are read from the labels of Node
Feature Discovery and of NVIDIA's GPU feature discovery. Facts that these do not contain are null in the Host,
or make a GPU unusable, and have a warning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

from imagematrix.common import json_documents
from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.nodes import labels as our_labels
from imagematrix.integrations.kubernetes.nodes.host_from_nfd_labels import (
    list_accelerator_resources,
    read_nfd_labels,
)
from imagematrix.integrations.kubernetes.nodes.host_from_our_labels import read_our_labels

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path
    from typing import BinaryIO

    from imagematrix.hardware.host.host import Host

STREAM = "-"
LISTS = ("List", "NodeList", "PodList", "ResourceClaimList", "ResourceSliceList")
PREFIX = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9.]*[a-z0-9])?", re.ASCII)  # of a label's key
LABELS = 2_000  # labels to read from one node; real nodes have about 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """A taint of a node, with its effect, such as NoSchedule."""

    key: str
    value: str
    effect: str

    def __str__(self) -> str:
        return f"{self.key}{f'={self.value}' if self.value else ''}:{self.effect}"


@dataclass(frozen=True, kw_only=True, eq=False)
class ClusterNode:
    """A node: its name, its valid labels, and the Host that they describe.

    The other fields decide which pods it takes: whether it is `cordoned`, its taints, and what it offers.
    """

    name: str
    labels: Mapping[str, str]
    host: Host
    cordoned: bool = False
    taints: tuple[Taint, ...] = ()
    allocatable: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_our_labels(self) -> bool:
        """Whether the node has our own labels."""
        return our_labels.ARCH in self.labels

    @cached_property
    def class_name(self) -> str:
        """The name of the class of its Host, whatever its class label says."""
        return our_labels.make_labels(self.host)[our_labels.CLASS]


def load_nodes(path: Path, stream: BinaryIO) -> tuple[ClusterNode, ...]:
    """Return the nodes in a file, or in `stream` if the path is "-"; raise UsageError if there are none."""
    return parse_nodes(read_json(path, stream), name_file(path))


def name_file(path: Path) -> str:
    """Return how messages name a file."""
    return "stdin" if str(path) == STREAM else str(path)


def read_json(path: Path, stream: BinaryIO) -> object:
    """Return the JSON value in a file, or in `stream` if the path is "-"; raise UsageError if invalid."""
    if str(path) != STREAM:
        return json_documents.read_json(path)
    raw = stream.read(json_documents.LIMIT + 1)
    if len(raw) > json_documents.LIMIT:
        raise UsageError(f"stdin: exceeds {json_documents.LIMIT // 2**20} MiB, too large for a list of nodes")
    return json_documents.parse_json(raw, "stdin")


def parse_nodes(data: object, where: str) -> tuple[ClusterNode, ...]:
    """Return the nodes of a list, or of a single Node object, sorted by name."""
    return describe_nodes(list_objects(data, where), where)


def list_objects(data: object, where: str) -> tuple[json_documents.Fields, ...]:
    """Return the objects of a list, or `data` itself if it is a single object."""
    fields = json_documents.Fields(data, where)
    kind = fields.get_text("kind")
    if kind not in LISTS:
        return (fields,)
    # In a NodeList of an API server the items have no kind. In a List of kubectl they do.
    item_kind = {"kind": kind.removesuffix("List")} if kind != "List" else {}
    return tuple(
        json_documents.Fields({**item_kind, **item.data}, f"{where}: items[{index}]")
        for index, item in enumerate(fields.list_objects("items"))
    )


def describe_nodes(items: Iterable[json_documents.Fields], where: str) -> tuple[ClusterNode, ...]:
    """Return the nodes that Node objects describe, sorted by name.

    Raises UsageError if an object is not a node, a name occurs twice, or there are no objects.
    """
    nodes: dict[str, ClusterNode] = {}
    for item in items:
        node = _parse_node(item)
        if node.name in nodes:
            raise UsageError(f"{where}: duplicate node {node.name[:80]!r}")
        nodes[node.name] = node
    if not nodes:
        raise UsageError(f"{where}: no nodes found", remedy="write it with `kubectl get nodes -o json`")
    return tuple(nodes[name] for name in sorted(nodes))


def _parse_node(fields: json_documents.Fields) -> ClusterNode:
    if fields.get_text("kind") != "Node":
        raise fields.fail("kind", f"expected Node, found {fields.get_text('kind')[:80]!r}")
    metadata = fields.get_object_or_none("metadata")
    if metadata is None:
        raise fields.fail("metadata", "is missing (expected an object)")
    labels, invalid = _filter_labels(metadata.get_text_map("labels"))
    status = fields.get_object_or_empty("status")
    capacity = status.get_text_map("capacity")
    if our_labels.ARCH in labels:
        host = read_our_labels(labels)
        if not host.gpus:  # GPUs that somebody offers contradict labels without any
            hints = (*host.accelerators, *list_accelerator_resources(capacity))
            host = replace(host, accelerators=hints)
    else:
        architecture = status.get_object_or_empty("nodeInfo").get_text_or_none("architecture")
        host = read_nfd_labels(labels, architecture, capacity)
    if invalid:
        host = replace(host, warnings=(*host.warnings, f"{invalid} invalid labels were ignored"))
    spec = fields.get_object_or_empty("spec")
    return ClusterNode(
        name=metadata.get_text("name"),
        labels=labels,
        host=host,
        cordoned=spec.get_boolean("unschedulable"),
        taints=tuple(
            Taint(
                value=taint.get_text_or_none("value") or "",
                key=taint.get_text("key"),
                effect=taint.get_text("effect"),
            )
            for taint in spec.list_objects("taints")
        ),
        allocatable=status.get_text_map("allocatable"),
    )


def _filter_labels(labels: Mapping[str, str]) -> tuple[dict[str, str], int]:
    """Return the labels that an API server would accept, and the number of invalid ones."""
    valid = {}
    for key, value in list(labels.items())[:LABELS]:
        prefix, slash, name = key.rpartition("/")
        has_prefix = not slash or PREFIX.fullmatch(prefix)
        if has_prefix and name and our_labels.is_valid_value(name) and our_labels.is_valid_value(value):
            valid[key] = value
    return valid, len(labels) - len(valid)
