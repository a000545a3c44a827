"""Admission: which image a pod gets when it is created, by the classes of nodes that it may run on.

`admit` is a pure function of a pod and a Policy. `policy` says the same in CEL, for an API server that
decides by itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from imagematrix.errors import UsageError
from imagematrix.kubernetes.affinity import integer, isin, required
from imagematrix.kubernetes.labels import CLASS, FLAG
from imagematrix.kubernetes.placed import image

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from imagematrix.kubernetes.classes import Class, Classes

    Json = Mapping[str, Any]

__all__ = [
    "ABSENT",
    "LISTS",
    "NODE",
    "NODE_TERMS",
    "SHOWN",
    "WIDEST",
    "Admission",
    "PodClass",
    "Policy",
    "admit",
    "policy",
]

LISTS = ("initContainers", "containers", "ephemeralContainers")
EPHEMERAL = (
    "ephemeralcontainers"  # the subresource whose update adds such a container, and changes nothing else
)
NODE = "metadata.name"  # the field by which a DaemonSet's pods name their node
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
NODE_TERMS = f"/spec/affinity/nodeAffinity/{REQUIRED}/nodeSelectorTerms"
ABSENT = "!"  # among the values of a label: some nodes lack it; no label has this value
WIDEST = 40  # containers in one list of a pod, or terms of its affinity; one with more is left alone
SHOWN = 8  # classes that a reason names
VALUES = 500  # of one label over all classes; one with more does not tell classes apart here
FEATURES = ("feature.node.kubernetes.io/", FLAG)  # labels about flags, by which nobody selects nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class PodClass:
    """A class as pods see it: its name, its image or "", and the values that its nodes have of labels.

    `values` has ABSENT for a label that some of them lack. What it has no key for tells nothing.
    """

    name: str
    image: str
    values: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What to do with pods that use the image `name`: replace it by that of their class.

    Where the classes that a pod may get need different images, it is refused if `deny`, or left alone.
    """

    name: str
    classes: tuple[PodClass, ...]
    deny: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What becomes of a pod: a JSON patch, or the `reason` why there is none, and whether it is `refused`."""

    patch: tuple[dict[str, Any], ...] = ()
    reason: str | None = None
    refused: bool = False


def policy(name: str, grouped: Classes, *, deny: bool = False) -> Policy:
    """Return the policy for an image by the classes of a cluster.

    Raises UsageError if a class that gets an image lacks the label with its name: its nodes could not be told
    from others.
    """
    for each in grouped.classes:
        if each.variant and not each.labelled:
            raise UsageError(
                f"nodes of the class {each.name} lack the label {CLASS}",
                remedy=f"label them with `imagematrix kubernetes labels`, such as {each.nodes[0].name}",
            )
    keys = _telling(grouped.classes)
    return Policy(
        name=name,
        classes=tuple(
            PodClass(
                name=each.name,
                image=image(each.variant) if each.variant else "",
                values={key: _values(each, key) for key in keys},
            )
            for each in grouped.classes
        ),
        deny=deny,
    )


def admit(pod: Json, policy: Policy, *, subresource: str = "") -> Admission:
    """Return what becomes of a pod that is created, or gets an ephemeral container by a subresource.

    The image is replaced where all classes that the pod's node selector, affinity, node name and label
    imagematrix.io/class leave, and that something fits, get the same. The pod then gets the affinity to
    classes with this image. Other images are never touched, so that a second call changes nothing.
    """
    spec = pod["spec"]
    uses = [
        f"/spec/{name}/{place}/image"
        for name in LISTS
        for place, container in enumerate(spec.get(name) or ())
        if container.get("image") == policy.name
    ]
    if not uses:
        return Admission()
    terms = required(spec)
    wide = any(len(some) > WIDEST for some in (*(spec.get(name) or () for name in LISTS), terms or ()))
    left = [] if wide else [each for each in policy.classes if _may_run(pod, each)]
    images = [each.image for each in left if each.image]
    if wide or len(set(images)) != 1:
        return Admission(reason=_reason(policy.name, left, images, wide=wide), refused=policy.deny)
    patch = [{"op": "replace", "path": path, "value": images[0]} for path in uses]
    if subresource != EPHEMERAL:
        names = [each.name for each in policy.classes if each.image == images[0]]
        patch += _placing(spec, terms, isin(CLASS, *names))
    return Admission(patch=tuple(patch))


def _may_run(pod: Json, each: PodClass) -> bool:
    """Whether some node of a class may be one that a pod may run on, as far as is known."""
    spec, values = pod["spec"], each.values
    label = (pod.get("metadata", {}).get("labels") or {}).get(CLASS)
    wanted = dict(spec.get("nodeSelector") or {})
    if spec.get("nodeName"):
        wanted[NODE] = spec["nodeName"]
    terms = required(spec)
    return (
        label in (None, each.name)
        and all(value in values.get(key, (value,)) for key, value in wanted.items())
        and (terms is None or any(_may_match(term, values) for term in terms))
    )


def _may_match(term: Json, values: Mapping[str, tuple[str, ...]]) -> bool:
    asked = [*(term.get("matchExpressions") or ()), *(term.get("matchFields") or ())]
    return bool(asked) and all(
        one["key"] not in values or _may_meet(one, values[one["key"]]) for one in asked
    )


def _may_meet(requirement: Json, there: Collection[str]) -> bool:
    """Whether one of the values of a label, of which one may be ABSENT, meets a requirement."""
    values = requirement.get("values") or []
    meets: Callable[[str], bool] = {
        "In": lambda value: value in values,
        "NotIn": lambda value: value not in values,
        "Exists": lambda value: value != ABSENT,
        "DoesNotExist": lambda value: value == ABSENT,
        "Gt": lambda value: _compared(value, values) > 0,
        "Lt": lambda value: _compared(value, values) < 0,
    }.get(requirement["operator"], lambda _: True)
    return any(map(meets, there))


def _compared(value: str, values: Sequence[str]) -> int:
    """Return whether a label is above a bound (1) or below it (-1); 0 if either is no number."""
    number, bound = integer(value), integer(values[0]) if values else None
    return 0 if number is None or bound is None else (number > bound) - (number < bound)


def _reason(name: str, left: Sequence[PodClass], images: Sequence[str], *, wide: bool) -> str:
    if wide:
        return f"{name}: the pod has more than {WIDEST} containers or node selector terms"
    if not left:
        return f"{name}: no class of nodes matches the pod's node selector and affinity"
    many = len(left) > SHOWN
    which = f"{len(left)} classes" if many else ", ".join(each.name for each in left)
    if not images:
        return f"{name}: nothing fits the nodes that the pod may get: {which}"
    return f"{name}: nodes that the pod may get need different images: {which}; select one by {CLASS}"


def _placing(
    spec: Json, terms: Sequence[Json] | None, expression: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the operations that add a requirement to a pod's node affinity: to each of its terms."""
    if terms is None:
        selector = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
        there = spec.get("affinity")
        if there is None:
            yield _add("/spec/affinity", {"nodeAffinity": {REQUIRED: selector}})
        elif there.get("nodeAffinity") is None:
            yield _add("/spec/affinity/nodeAffinity", {REQUIRED: selector})
        else:
            yield _add(f"/spec/affinity/nodeAffinity/{REQUIRED}", selector)
        return
    for place, term in enumerate(terms):
        if term.get("matchExpressions"):
            yield _add(f"{NODE_TERMS}/{place}/matchExpressions/-", expression)
        elif term.get("matchFields"):
            yield _add(f"{NODE_TERMS}/{place}/matchExpressions", [expression])
        # A term without either matches no node, and has to go on matching none.


def _add(path: str, value: object) -> dict[str, Any]:
    return {"op": "add", "path": path, "value": value}


def _telling(classes: Iterable[Class]) -> list[str]:
    """Return the labels whose values differ between classes, with the node's name, that are few enough."""
    some = list(classes)
    keys = {
        key for each in some for node in each.nodes for key in node.labels if not key.startswith(FEATURES)
    }
    distinct = []
    for key in sorted({*keys, NODE}):
        values = [_values(each, key) for each in some]
        if sum(map(len, values)) <= VALUES and (len(Counter(values)) > 1 or key == CLASS):
            distinct.append(key)
    return distinct


def _values(each: Class, key: str) -> tuple[str, ...]:
    if key == NODE:
        return tuple(node.name for node in each.nodes)
    return tuple(sorted({node.labels.get(key, ABSENT) for node in each.nodes}))
