"""Why a node cannot take a pod: the scheduler's conditions on labels, taints and GPUs, in words.

Other conditions of the scheduler, such as processor time, volumes and the spread of pods, are not looked at.
Sources: https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node and
https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration.
"""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.common.groups import group_values
from imagematrix.common.text import shorten_words
from imagematrix.integrations.kubernetes.nodes.gpu_counts import select_gpu_quantities
from imagematrix.integrations.kubernetes.nodes.labels import CLASS
from imagematrix.integrations.kubernetes.workloads.affinity import is_requirement_met

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from imagematrix.integrations.kubernetes.explain.pod import Pod
    from imagematrix.integrations.kubernetes.nodes.classes import NodeClass
    from imagematrix.integrations.kubernetes.nodes.nodes import ClusterNode

REPELLING = ("NoSchedule", "NoExecute")  # effects of taints that keep a pod off; the others are a preference
CORDONED = "node.kubernetes.io/unschedulable"
TERMS = 3  # terms of an affinity that a reason names
VALUES = 4  # values, resources or nodes' labels that a reason names
GROUPS = 100  # groupings of classes to keep: pods may ask for any labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Why a node cannot take a pod, what the node `has` instead, and what to do about it, or None."""

    why: str
    has: str | None = None
    fix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacles:
    """Why some nodes cannot take a pod, the number of these nodes, and what to do about it, or None."""

    why: str
    nodes: int
    fix: str | None


def find_obstacles(pod: Pod, node: ClusterNode, used: Mapping[str, int]) -> tuple[Obstacle, ...]:
    """Return all obstacles, none if the node can take the pod; `used` are the GPUs that its pods request."""
    return (
        *_find_label_obstacles(pod, node),
        *_find_taint_obstacles(pod, node),
        *_find_gpu_obstacles(pod, node, used),
    )


def count_obstacles(obstacles: Iterable[tuple[Obstacle, int]]) -> tuple[Obstacles, ...]:
    """Return obstacles, each with its number of nodes, the most frequent first; equal ones are added up."""
    groups = group_values(
        ((obstacle.why, obstacle.fix), (obstacle.has, nodes)) for obstacle, nodes in obstacles
    )
    counted = []
    for (why, fix), found in groups.items():
        known = sorted({has for has, _ in found if has})
        instead = f"; found {shorten_words(known, VALUES)}" if known else ""
        counted.append(Obstacles(why=why + instead, nodes=sum(nodes for _, nodes in found), fix=fix))
    return tuple(sorted(counted, key=lambda each: (-each.nodes, each.why)))


class KnownNodes:
    """The nodes of a cluster by name, as they are now, and the GPUs that the pods of each request, if known.

    Nodes that a pod cannot tell apart are compared with it once: a cluster may have thousands of nodes, and
    as many pending pods that differ.
    """

    def __init__(self, nodes: Iterable[ClusterNode], used: Mapping[str, Mapping[str, int]]) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._used = used
        self._facts = {name: self._list_facts(node) for name, node in self._nodes.items()}
        self._groups: dict[tuple[NodeClass, frozenset[str]], list[list[ClusterNode]]] = {}

    def find_obstacles(self, pod: Pod, node_class: NodeClass) -> Iterator[tuple[tuple[Obstacle, ...], int]]:
        """Yield the obstacles of nodes of a class, none for those that can take a pod, and their number."""
        named = pod.named_nodes
        for group in self._group_nodes(node_class, pod.label_keys):
            alike = [node for node in group if node.name not in named]
            if alike:
                yield self._find_obstacles(pod, alike[0]), len(alike)
            for node in group if len(alike) < len(group) else ():
                if node.name in named:
                    yield self._find_obstacles(pod, node), 1

    def _find_obstacles(self, pod: Pod, node: ClusterNode) -> tuple[Obstacle, ...]:
        return find_obstacles(pod, node, self._used.get(node.name, {}))

    def _group_nodes(self, node_class: NodeClass, keys: frozenset[str]) -> list[list[ClusterNode]]:
        """Return the nodes of a class in groups that are alike in labels with these keys, and in all else."""
        if (node_class, keys) not in self._groups:
            nodes = [self._nodes.get(node.name, node) for node in node_class.nodes]
            groups = group_values(
                ((self._facts.get(node.name), *map(node.labels.get, keys)), node) for node in nodes
            )
            if len(self._groups) >= GROUPS:
                self._groups.clear()
            self._groups[node_class, keys] = [*groups.values()]
        return self._groups[node_class, keys]

    def _list_facts(self, node: ClusterNode) -> tuple[object, ...]:
        """Return what decides which pods a node takes, besides its labels and its name."""
        gpus = select_gpu_quantities(node.allocatable), self._used.get(node.name, {})
        return node.cordoned, node.taints, *(frozenset(counts.items()) for counts in gpus)


def _find_label_obstacles(pod: Pod, node: ClusterNode) -> Iterator[Obstacle]:
    if pod.node and pod.node != node.name:
        yield Obstacle(why=f"the pod names the node {pod.node}")
    if pod.label is not None and node.labels.get(CLASS) != pod.label:
        yield Obstacle(why=f"the pod's label {CLASS} is {pod.label}", has=_describe_label(node, CLASS))
    for key, value in pod.selector.items():
        if node.labels.get(key) != value:
            yield Obstacle(why=f"the node selector asks for {key}={value}", has=_describe_label(node, key))
    if pod.terms is None:
        return
    mismatches = [mismatch for term in pod.terms if (mismatch := _explain_mismatch(term, node))]
    if len(mismatches) == len(pod.terms):
        words = shorten_words([why for why, _ in mismatches], TERMS, ", or ", ", or {} more terms")
        has = mismatches[0][1] if len(mismatches) == 1 else None
        yield Obstacle(why=f"the node affinity asks for {words or 'nothing, which no node meets'}", has=has)


def _explain_mismatch(term: Mapping[str, Any], node: ClusterNode) -> tuple[str, str | None] | None:
    """Return what a term asks for that a node lacks, and what the node has; None if the node meets it."""
    requirements = [
        *(
            (expression, node.labels.get(expression["key"]))
            for expression in term.get("matchExpressions", ())
        ),
        *((field, node.name) for field in term.get("matchFields", ())),
    ]
    labels = len(term.get("matchExpressions", ()))
    for index, (requirement, value) in enumerate(requirements):
        if not is_requirement_met(requirement, value):
            key, operator = requirement["key"], requirement["operator"]
            wanted = f"{key} {operator} {shorten_words(requirement['values'], VALUES)}".rstrip()
            if index >= labels:  # the names of other nodes tell nothing
                return wanted, None
            return wanted, f"no {key}" if value is None else f"{key}={value}"
    return None if requirements else ("an empty term, which no node meets", None)


def _describe_label(node: ClusterNode, key: str) -> str:
    return f"{key}={node.labels[key]}" if key in node.labels else f"no {key}"


def _find_taint_obstacles(pod: Pod, node: ClusterNode) -> Iterator[Obstacle]:
    if node.cordoned and not _is_tolerated(pod, CORDONED, "", "NoSchedule"):
        yield Obstacle(why="the node is cordoned", fix="make it schedulable again with `kubectl uncordon`")
    for taint in node.taints:
        if taint.effect not in REPELLING or (node.cordoned and taint.key == CORDONED):
            continue
        if not _is_tolerated(pod, taint.key, taint.value, taint.effect):
            fix = f"add a toleration of {taint.key} with the effect {taint.effect}, if its pods belong there"
            yield Obstacle(why=f"the pod does not tolerate the taint {taint}", fix=fix)


def _is_tolerated(pod: Pod, key: str, value: str, effect: str) -> bool:
    """Whether a pod has a toleration for a taint; one with an operator that we do not know may be for it."""
    for toleration in pod.tolerations:
        operator = toleration.get("operator", "Equal")
        if (
            toleration.get("effect", effect) == effect
            and (toleration["key"] == key if "key" in toleration else operator == "Exists")
            and (operator != "Equal" or toleration.get("value", "") == value)
        ):
            return True
    return False


def _find_gpu_obstacles(pod: Pod, node: ClusterNode, used: Mapping[str, int]) -> Iterator[Obstacle]:
    offered = select_gpu_quantities(node.allocatable)
    for resource, wanted in pod.gpus.items():
        offer = offered.get(resource, 0)
        free = max(0, offer - used.get(resource, 0))
        why = f"the pod requests {wanted} {resource}"
        if wanted <= free:
            continue
        if wanted <= offer:
            yield Obstacle(why=why, has=f"{free} of {offer} free", fix="wait until other pods end")
        elif offered and not offer:
            alternatives = shorten_words([f"{count} {name}" for name, count in offered.items()], VALUES)
            fix = f"request {shorten_words([*offered], VALUES, ' or ')}"
            yield Obstacle(why=why, has=alternatives, fix=fix)
        else:
            yield Obstacle(why=why, has=str(offer) if offer else "none")
