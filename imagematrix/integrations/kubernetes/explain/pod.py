"""A pod, as `kubectl get pod NAME -o json` writes it: what decides where it may run, and its images."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.admission.admission import LISTS
from imagematrix.integrations.kubernetes.nodes.gpu_counts import count_requested
from imagematrix.integrations.kubernetes.nodes.labels import CLASS
from imagematrix.integrations.kubernetes.nodes.nodes import list_objects
from imagematrix.integrations.kubernetes.workloads.affinity import REQUIRED, get_required_terms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from imagematrix.common import json_documents

    Json = Mapping[str, Any]

UNNAMED = "(no name yet)"
MATCHES = ("matchExpressions", "matchFields")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod: its name, its phase, and `document`, which has only what decides where it may run, and is valid.

    `gpus` are the requested GPUs by resource.
    """

    name: str
    phase: str
    document: Json
    gpus: Mapping[str, int]

    @property
    def node(self) -> str | None:
        """The node that it has, or names."""
        return self.document["spec"].get("nodeName") or None

    @property
    def label(self) -> str | None:
        """Its label imagematrix.io/class, by which it asks for the image of a class."""
        labels: dict[str, str] = self.document["metadata"].get("labels", {})
        return labels.get(CLASS)

    @property
    def selector(self) -> Mapping[str, str]:
        """The labels that its node selector asks for."""
        selector: dict[str, str] = self.document["spec"].get("nodeSelector", {})
        return selector

    @property
    def terms(self) -> list[dict[str, Any]] | None:
        """The terms of its required node affinity, of which one has to match; None if it requires none."""
        return get_required_terms(self.document["spec"])

    @property
    def label_keys(self) -> frozenset[str]:
        """The labels of nodes that it asks for."""
        asked = (one["key"] for term in self.terms or () for one in term.get("matchExpressions", ()))
        return frozenset([CLASS, *self.selector, *asked])

    @property
    def named_nodes(self) -> frozenset[str]:
        """The nodes that it names, to be on them or not."""
        fields = (one for term in self.terms or () for one in term.get("matchFields", ()))
        return frozenset([self.node or "", *(name for one in fields for name in one["values"])])

    @property
    def tolerations(self) -> list[dict[str, str]]:
        """The taints that it tolerates."""
        tolerations: list[dict[str, str]] = self.document["spec"].get("tolerations", [])
        return tolerations

    @property
    def claims(self) -> bool:
        """Whether it has resource claims, which are devices that are requested in another way."""
        return bool(self.document["spec"].get("resourceClaims"))

    @property
    def images(self) -> tuple[str, ...]:
        """The images of its containers of all kinds."""
        spec = self.document["spec"]
        containers = (container for name in LISTS for container in spec.get(name, ()))
        return tuple(container["image"] for container in containers if "image" in container)


def parse_pod(data: object, where: str) -> Pod:
    """Return the pod in a document, or the only one of a list; raise UsageError if it is invalid."""
    items = list_objects(data, where)
    if len(items) != 1:
        raise UsageError(f"{where}: expected one pod, found {len(items)}", remedy="name one to kubectl")
    (fields,) = items
    kind = fields.get_text("kind")
    if kind != "Pod":
        raise UsageError(
            f"{where}: expected a Pod, found {kind[:80]!r}",
            remedy="write it with `kubectl get pod NAME -o json`",
        )
    status = fields.get_object_or_empty("status")
    return Pod(
        name=get_pod_name(fields),
        phase=status.get_text_or_none("phase") or "Pending",
        document=reduce_pod(fields),
        gpus=dict(sorted(count_requested(fields.get_object_or_empty("spec")).items())),
    )


def get_pod_name(fields: json_documents.Fields) -> str:
    """Return a pod's name with its namespace, as far as it has them."""
    metadata = fields.get_object_or_empty("metadata")
    name = metadata.get_text_or_none("name") or metadata.get_text_or_none("generateName") or UNNAMED
    namespace = metadata.get_text_or_none("namespace")
    return f"{namespace}/{name}" if namespace else name


def reduce_pod(fields: json_documents.Fields) -> dict[str, Any]:
    """Return a pod with only what decides where it may run, and what it uses: equal for the pods of one Job.

    Raises UsageError if that is invalid.
    """
    metadata, spec = fields.get_object_or_empty("metadata"), fields.get_object_or_empty("spec")
    label = metadata.get_text_map("labels").get(CLASS)
    selector = spec.get_text_map("nodeSelector")
    tolerations = [
        _reduce_texts(toleration, "key", "operator", "value", "effect")
        for toleration in spec.list_objects("tolerations")
    ]
    terms = _reduce_terms(spec)
    affinity = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}}
    reduced = {
        **_reduce_texts(spec, "nodeName"),
        **({"nodeSelector": selector} if selector else {}),
        **({"tolerations": tolerations} if tolerations else {}),
        **({"affinity": affinity} if terms is not None else {}),
        **({"resourceClaims": [{}]} if list(spec.list_objects("resourceClaims")) else {}),
    }
    for name in LISTS:
        containers = []
        for container in spec.list_objects(name):
            resources = container.get_object_or_empty("resources")
            quantities = {kind: resources.get_text_map(kind) for kind in ("limits", "requests")}
            present = {kind: texts for kind, texts in quantities.items() if texts}
            texts = _reduce_texts(container, "image", "restartPolicy")
            containers.append(texts | ({"resources": present} if present else {}))
        reduced |= {name: containers} if containers else {}
    # An empty label is that of no class, and admission says so.
    labels = {} if label is None else {"labels": {CLASS: label}}
    return {"kind": "Pod", "metadata": labels, "spec": reduced}


def _reduce_terms(spec: json_documents.Fields) -> list[dict[str, Any]] | None:
    selector = (
        spec.get_object_or_empty("affinity").get_object_or_empty("nodeAffinity").get_object_or_none(REQUIRED)
    )
    if selector is None:
        return None
    return [
        {
            name: [
                {
                    "key": requirement.get_text("key"),
                    "operator": requirement.get_text("operator"),
                    "values": [*requirement.get_texts("values")],
                }
                for requirement in term.list_objects(name)
            ]
            for name in MATCHES
            if term.has(name)
        }
        for term in selector.list_objects("nodeSelectorTerms")
    ]


def _reduce_texts(fields: json_documents.Fields, *keys: str) -> dict[str, Any]:
    return {key: text for key in keys if (text := fields.get_text_or_none(key))}
