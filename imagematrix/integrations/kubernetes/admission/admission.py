"""Admission: which image a pod gets, according to the classes of nodes that it may run on.

A pod that exists can get other images, by an update, and ephemeral containers, but its affinity stays. So
these get the image of the pod's node, and a pod without a node gets none.

`admit` is a pure function of a pod and an AdmissionPolicy. The module `policy` expresses the same in CEL,
which API servers evaluate.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from operator import and_, eq, or_

from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.nodes.labels import CLASS, FLAG
from imagematrix.integrations.kubernetes.workloads.affinity import (
    REQUIRED,
    get_required_terms,
    make_label_test,
    match_value_in,
)
from imagematrix.integrations.kubernetes.workloads.placement import get_image

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any, Literal

    from imagematrix.integrations.kubernetes.nodes.classes import Classes, NodeClass

    Json = Mapping[str, Any]
    # The pod is too large to look at; it matches no class; no image fits; it needs several images.
    Cause = Literal["wide", "nowhere", "nothing", "several"]

LISTS = ("initContainers", "containers", "ephemeralContainers")
# The requests by which a pod gets images, by what they are about. No other sets one: `binding`, `resize` and
# `status` leave images and affinity alone.
OPERATIONS = {"pods": ("CREATE", "UPDATE"), "pods/ephemeralcontainers": ("UPDATE",)}
REQUIREMENTS = ("matchExpressions", "matchFields")  # the lists of a term
NODE = "metadata.name"  # the field by which a DaemonSet's pods name their node
NODE_TERMS = f"/spec/affinity/nodeAffinity/{REQUIRED}/nodeSelectorTerms"
ABSENT = "!"  # among the values of a label if some nodes lack it; no label has this value
WIDEST = 40  # containers in a list of a pod, terms of its affinity, requirements in a list of a term
WANTED = 1_000  # values of a requirement; a pod with a longer one, or with more than WIDEST, is left alone
WIDE = (
    f"the pod has more than {WIDEST} containers, node selector terms or requirements in a term, "
    f"or one with more than {WANTED:,} values"
)
NOWHERE = "no class of nodes matches the pod's node selector and affinity"
UNPLACED = "the pod is on no node of a known class, which alone decides once a pod exists; create it again"
SHOWN = 8  # classes that a reason names
# Values of one label over all classes: a policy compares each with up to WANTED, and may cost only so much.
VALUES = 500
# Characters of one class, and of all. An API server takes expressions of up to 100,000, and `kubectl apply`
# keeps a copy of an object, with escapes, in an annotation of up to 262,144.
CLASS_ROOM, ROOM = 80_000, 240_000
ESCAPED = 6  # characters besides a text: quotes, their escapes, and a separator
FRAME = 120  # characters of a class besides its texts
FEATURES = ("feature.node.kubernetes.io/", FLAG)  # prefixes of labels by which nobody selects nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class PodClass:
    """A class as pods see it: its name, its image or "", its nodes, and their values of each other label.

    `values` contains ABSENT for a label that some nodes lack. A label without a key in it matches anything,
    but the class label, whose only value is the name. Without `nodes`, any node may be one of the class.
    """

    name: str
    image: str
    values: Mapping[str, tuple[str, ...]]
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionPolicy:
    """What to do with pods that use the image `name`: replace it with the image of their class.

    A pod that may run on classes with different images is refused if `deny`, and left alone otherwise. So is
    every pod that uses the image if there is a `problem`, which says why no class has an image.
    `omitted_labels` would distinguish classes, but have too many values, or there is no room for them; NODE
    is among them if there is no room for the names of nodes in CEL.
    """

    name: str
    classes: tuple[PodClass, ...]
    deny: bool = False
    omitted_labels: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The decision about a pod: a JSON patch, or the `reason` for none; and whether the pod is `refused`.

    `cause` is the reason in one word, and `possible` are the names of the classes that it is about: those
    that the pod may run on, as far as the labels show.
    """

    patch: tuple[dict[str, Any], ...] = ()
    reason: str | None = None
    refused: bool = False
    cause: Cause | None = None
    possible: tuple[str, ...] = ()


def make_policy(name: str, node_classes: Classes, *, deny: bool = False) -> AdmissionPolicy:
    """Return the policy for an image and the classes of a cluster.

    Raises UsageError if a class gets an image but its nodes lack the class label, which distinguishes them.
    """
    classes = node_classes.classes
    require_class_labels(classes)
    images = [get_image(node_class.variant) if node_class.variant else "" for node_class in classes]
    # The class label decides alone, and a DaemonSet's pods name their nodes: no other label is as important.
    room = _ExpressionRoom(
        FRAME + len(node_class.name) + len(image) for node_class, image in zip(classes, images, strict=True)
    )
    nodes = [tuple(node.name for node in node_class.nodes) for node_class in classes]
    omitted = [] if room.take(nodes) else [NODE]
    values: list[dict[str, tuple[str, ...]]] = [{} for _ in classes]
    for key in _list_labels(classes):
        values_by_class = [_list_values(node_class, key) for node_class in classes]
        if len(set(values_by_class)) == 1:
            continue
        is_short = sum(map(len, values_by_class)) <= VALUES
        if is_short and room.take((key, *class_values) for class_values in values_by_class):
            for by_key, class_values in zip(values, values_by_class, strict=True):
                by_key[key] = class_values
        else:
            omitted.append(key)
    return AdmissionPolicy(
        name=name,
        classes=tuple(
            PodClass(name=node_class.name, image=image, values=by_key, nodes=names)
            for node_class, image, by_key, names in zip(classes, images, values, nodes, strict=True)
        ),
        deny=deny,
        omitted_labels=tuple(omitted),
    )


def require_class_labels(classes: Iterable[NodeClass]) -> None:
    """Raise UsageError if a class gets an image but its nodes lack the class label."""
    for node_class in classes:
        if node_class.variant and not node_class.is_labelled:
            raise UsageError(
                f"nodes of the class {node_class.name} lack the label {CLASS}",
                remedy=f"label them with `imagematrix kubernetes labels`, such as {node_class.nodes[0].name}",
            )


def admit(pod: Json, policy: AdmissionPolicy, *, before: Json | None = None) -> Admission:
    """Return the decision about a pod that is created, or changed from what it was `before`.

    A new pod's node selector, affinity, node name and label imagematrix.io/class limit the classes on which
    it may run; a node that no class has may be a new one of any class. If those of them that get an image get
    the same image, the pod gets it too, with an affinity to the classes that have it. A changed pod gets the
    image of its node's class in containers that did not use the name before. Other images are never touched,
    so a second call changes nothing.
    """
    spec = pod["spec"]
    earlier = {} if before is None else _find_containers_using(before["spec"], policy.name)
    paths = [
        path
        for container, path in _find_containers_using(spec, policy.name).items()
        if container not in earlier
    ]
    if not paths:
        return Admission()
    if policy.problem:
        return Admission(reason=f"{policy.name}: {policy.problem}", refused=policy.deny)
    terms = get_required_terms(spec)
    wide = is_too_wide(spec)
    possible: list[PodClass] = []
    if not wide:
        possible = (
            _find_possible_classes(pod, policy)
            if before is None
            else [pod_class for pod_class in policy.classes if spec.get("nodeName") in pod_class.nodes]
        )
    images = [pod_class.image for pod_class in possible if pod_class.image]
    if wide or len(set(images)) != 1:
        cause: Cause = "wide" if wide else "several" if images else "nothing" if possible else "nowhere"
        names = tuple(pod_class.name for pod_class in possible)
        reason = _make_reason(policy.name, cause, names, new=before is None)
        return Admission(reason=reason, refused=policy.deny, cause=cause, possible=names)
    patch = [{"op": "replace", "path": path, "value": images[0]} for path in paths]
    if before is None:
        classes = [pod_class.name for pod_class in policy.classes if pod_class.image == images[0]]
        patch += _make_affinity_operations(spec, terms, match_value_in(CLASS, *classes))
    return Admission(patch=tuple(patch))


def admit_by_all(
    pod: Json, policies: Iterable[AdmissionPolicy], *, before: Json | None = None
) -> dict[str, Admission]:
    """Return the decisions of policies about a pod, by the policies' names, in the order of their patches.

    The affinity that comes with one image can decide another one. So whatever is undecided is looked at again
    until no policy changes the pod any more, and the order of the policies does not matter.
    """
    undecided = {policy.name: policy for policy in policies}
    decided: dict[str, Admission] = {}
    while True:
        admissions: dict[str, Admission] = {}
        for name, policy in undecided.items():
            admissions[name] = admit(pod, policy, before=before)
            if admissions[name].patch and len(undecided) > 1:
                pod = _apply_patch(pod, admissions[name].patch)
        patched = {name: admission for name, admission in admissions.items() if admission.patch}
        undecided = {name: policy for name, policy in undecided.items() if admissions[name].reason}
        decided |= patched
        if not (patched and undecided):
            return decided | admissions


def is_too_wide(spec: dict[str, Any]) -> bool:
    """Whether a pod asks for so much that looking at it would take long."""
    terms = get_required_terms(spec) or ()
    requirements = [term.get(name) or () for term in terms for name in REQUIREMENTS]
    lists = [*(spec.get(name) or () for name in LISTS), terms, *requirements]
    return any(len(items) > WIDEST for items in lists) or any(
        len(requirement.get("values") or ()) > WANTED
        for term_requirements in requirements
        for requirement in term_requirements
    )


def _find_containers_using(spec: Json, name: str) -> dict[object, str]:
    """Return the path of the image of each container that uses the image `name`, by its list and its name."""
    return {
        (key, container.get("name", index)): f"/spec/{key}/{index}/image"
        for key in LISTS
        for index, container in enumerate(spec.get(key) or ())
        if container.get("image") == name
    }


def _find_possible_classes(pod: Json, policy: AdmissionPolicy) -> list[PodClass]:
    """Return the classes on some node of which the pod may run, as far as the labels show."""
    spec, known = pod["spec"], _KnownClasses(policy.classes)
    label = (pod.get("metadata", {}).get("labels") or {}).get(CLASS)
    possible = known.all
    for key, value in (spec.get("nodeSelector") or {}).items():
        possible &= known.find(key, partial(eq, value))
    if spec.get("nodeName"):
        possible &= known.find_node(spec["nodeName"])
    terms = get_required_terms(spec)
    if terms is not None:
        matching = 0
        for term in terms:
            labels, fields = (term.get(name) or () for name in REQUIREMENTS)
            if labels or fields:  # a term without any requirement matches no node
                classes = (
                    *(known.find(one["key"], make_label_test(one)) for one in labels),
                    *(known.find_by_field(one) for one in fields),
                )
                matching |= reduce(and_, classes, known.all)
        possible &= matching
    return [
        pod_class
        for index, pod_class in enumerate(policy.classes)
        if possible >> index & 1 and label in (None, pod_class.name)
    ]


class _KnownClasses:
    """The classes of a policy that have a value of a label, or a node, as the bits of an integer.

    A class without the label may have any value. With sets of classes in place of one class at a time, a pod
    with thousands of requirements takes less than 0.1 s in the largest cluster.
    """

    def __init__(self, classes: Sequence[PodClass]) -> None:
        self.all = (1 << len(classes)) - 1
        self._classes = classes
        self._labels = {CLASS}.union(*(pod_class.values for pod_class in classes))
        self._by_value: dict[str, tuple[int, list[tuple[str | None, int]]]] = {}

    def find(self, key: str, is_met: Callable[[str | None], bool]) -> int:
        """Return the classes with some value that meets a condition; it is None if nodes lack the label."""
        if key not in self._labels:  # a pod may name any number of them
            return self.all
        if key not in self._by_value:
            without, by_value = 0, defaultdict[str | None, int](int)
            for index, pod_class in enumerate(self._classes):
                values = (pod_class.name,) if key == CLASS else pod_class.values.get(key)
                without |= (values is None) << index
                for value in values or ():
                    by_value[None if value == ABSENT else value] |= 1 << index
            self._by_value[key] = without, [*by_value.items()]
        without, classes_by_value = self._by_value[key]
        return reduce(or_, (bits for value, bits in classes_by_value if is_met(value)), without)

    def find_node(self, name: str) -> int:
        """Return the classes that may have a node: all, if it is in none."""
        return self._without_nodes | self._by_node.get(name, self.all)

    def find_by_field(self, requirement: Json) -> int:
        """Return the classes that may have a node that meets a requirement of `matchFields`.

        API servers accept only a name that the node has, or has not. Anything else may match.
        """
        values: Sequence[str] = requirement.get("values") or ()
        if requirement["key"] != NODE or len(values) != 1:
            return self.all
        if requirement["operator"] == "In":
            return self.find_node(values[0])
        if requirement["operator"] == "NotIn":
            only = (1 << index for index, each in enumerate(self._classes) if each.nodes == (values[0],))
            return self.all & ~reduce(or_, only, 0)
        return self.all

    @cached_property
    def _by_node(self) -> dict[str, int]:
        return {name: 1 << index for index, each in enumerate(self._classes) for name in each.nodes}

    @cached_property
    def _without_nodes(self) -> int:
        return sum((not each.nodes) << index for index, each in enumerate(self._classes))


def _make_reason(name: str, cause: Cause, possible: Sequence[str], *, new: bool) -> str:
    which = f"{len(possible)} classes" if len(possible) > SHOWN else ", ".join(possible)
    words = {
        "wide": WIDE,
        "nowhere": NOWHERE if new else UNPLACED,
        "nothing": f"no image fits the nodes that the pod may run on: {which}",
        "several": f"the nodes that the pod may run on need different images: {which}; select one by {CLASS}",
    }
    return f"{name}: {words[cause]}"


def _make_affinity_operations(
    spec: Json, terms: Sequence[Json] | None, expression: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the operations that add a requirement to each term of a pod's node affinity."""
    if terms is None:
        selector = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
        current = spec.get("affinity")
        if current is None:
            yield _make_add_operation("/spec/affinity", {"nodeAffinity": {REQUIRED: selector}})
        elif current.get("nodeAffinity") is None:
            yield _make_add_operation("/spec/affinity/nodeAffinity", {REQUIRED: selector})
        else:
            yield _make_add_operation(f"/spec/affinity/nodeAffinity/{REQUIRED}", selector)
        return
    for index, term in enumerate(terms):
        if term.get("matchExpressions"):
            yield _make_add_operation(f"{NODE_TERMS}/{index}/matchExpressions/-", expression)
        elif term.get("matchFields"):
            yield _make_add_operation(f"{NODE_TERMS}/{index}/matchExpressions", [expression])
        # A term without either matches no node, and must not start to match.


def _make_add_operation(path: str, value: object) -> dict[str, Any]:
    return {"op": "add", "path": path, "value": value}


def _apply_patch(pod: Json, patch: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a pod with operations of `admit` applied; the keys in their paths need no escapes."""
    result: dict[str, Any] = copy.deepcopy({**pod})
    for operation in patch:
        *parents, last = operation["path"].split("/")[1:]
        parent: Any = result
        for key in parents:
            parent = parent[int(key)] if isinstance(parent, list) else parent[key]
        value = copy.deepcopy(operation["value"])
        if isinstance(parent, list):
            parent.append(value)  # the operations replace or add keys, and append to lists
        else:
            parent[last] = value
    return result


class _ExpressionRoom:
    """The room that is left in the expressions of some classes, of which each uses some characters."""

    def __init__(self, used: Iterable[int]) -> None:
        self._used = [*used]

    def take(self, texts: Iterable[Iterable[str]]) -> bool:
        """Take room for some texts of each class; return whether there is enough."""
        used = [
            before + sum(len(text) + ESCAPED for text in class_texts)
            for before, class_texts in zip(self._used, texts, strict=True)
        ]
        if sum(used) > ROOM or max(used, default=0) > CLASS_ROOM:
            return False
        self._used = used
        return True


def _list_labels(classes: Sequence[NodeClass]) -> list[str]:
    """Return the labels by which pods may select nodes, but the class label, those of most nodes first.

    A node may have any number of labels of its own, which must not take the room of others.
    """
    nodes = (node for node_class in classes for node in node_class.nodes)
    counts = Counter(key for node in nodes for key in node.labels if not key.startswith(FEATURES))
    return sorted(counts.keys() - {CLASS}, key=lambda key: (-counts[key], key))


def _list_values(node_class: NodeClass, key: str) -> tuple[str, ...]:
    return tuple(sorted({node.labels.get(key, ABSENT) for node in node_class.nodes}))
