"""Classes of a small cluster, pods that use an image, and the image or the refusal that each pod gets."""

from typing import Any

from imagematrix.integrations.kubernetes.admission.admission import WIDE, AdmissionPolicy, PodClass
from imagematrix.integrations.kubernetes.nodes.labels import CLASS

NAME, OTHER = "reg/t:v1", "debian:trixie"
A, B = f"reg/t:v1-a@sha256:{'a' * 64}", f"reg/t:v1-b@sha256:{'b' * 64}"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def one_class(name, image, *, pool, zone=("x",), memory=("40",), nodes=()):
    told = {"pool": pool, "zone": zone, "memory": memory}
    return PodClass(name=name, image=image, values=told, nodes=nodes)


CLASSES = (
    one_class("h200", A, pool=("big",), memory=("141", "!"), nodes=("n1", "n2")),
    one_class("h100", A, pool=("big", "old"), zone=("x", "y"), nodes=("n3",)),
    one_class("l40s", B, pool=("small", "!"), zone=("y",), nodes=("n4",)),
    one_class("cpu", "", pool=("!",), zone=("z",), memory=("!",), nodes=("n5",)),
)
POLICY = AdmissionPolicy(name=NAME, classes=CLASSES, deny=True)


def pod(*images, labels=None, **spec):
    """Return a pod with a container for each image."""
    containers = [{"name": f"c{number}", "image": image} for number, image in enumerate(images)]
    metadata = {"name": "p"} | ({"labels": labels} if labels is not None else {})
    return {"kind": "Pod", "metadata": metadata, "spec": {"containers": containers, **spec}}


def asking(*terms):
    """Return an affinity that requires one of these terms."""
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": list(terms)}}}


def term(key, operator, *values, kind="matchExpressions"):
    return {kind: [{"key": key, "operator": operator} | ({"values": list(values)} if values else {})]}


def field(operator, *names):
    return term("metadata.name", operator, *names, kind="matchFields")["matchFields"]


def new_node(key, value):
    """Return the term of a pod that a DaemonSet makes for a node that is not known yet."""
    return term(key, "In", value) | {"matchFields": field("In", "n9")}


def images(given_pod):
    spec = given_pod["spec"]
    lists = ("initContainers", "containers", "ephemeralContainers")
    return [container.get("image") for name in lists for container in spec.get(name) or ()]


# What a pod's spec requires, and the image that the pod gets, or None.
DECIDED: list[tuple[dict[str, Any], str | None]] = [
    ({"nodeSelector": {CLASS: "h200"}}, A),
    ({"nodeSelector": {"pool": "big"}}, A),
    ({"nodeSelector": {"pool": "small"}}, B),
    ({"nodeSelector": {"pool": "big", "unknown": "x"}}, A),
    ({"nodeSelector": {"zone": "y"}}, None),
    ({"nodeSelector": {"zone": "z"}}, None),
    ({"nodeSelector": {"pool": "none"}}, None),
    ({}, None),
    ({"nodeName": "n4"}, B),
    ({"nodeName": ""}, None),
    ({"nodeName": "n9"}, None),
    ({"nodeName": "n9", "nodeSelector": {"pool": "big"}}, A),
    ({"nodeName": "n4", "nodeSelector": {"metadata.name": "n1"}}, B),
    ({"labels": {CLASS: "l40s"}}, B),
    ({"labels": {CLASS: "l40s"}, "nodeSelector": {"pool": "big"}}, None),
    ({"labels": {"app": "x"}, "nodeSelector": {"pool": "big"}}, A),
    ({"affinity": {}, "nodeSelector": {"pool": "big"}}, A),
    ({"affinity": {"podAffinity": {}}, "nodeSelector": {"pool": "big"}}, A),
    ({"affinity": {"nodeAffinity": {}}, "nodeSelector": {"pool": "big"}}, A),
    ({"affinity": asking(term("pool", "In", "big", "old"))}, A),
    ({"affinity": asking(term("pool", "In", "big"), term("pool", "In", "old"))}, A),
    ({"affinity": asking(term("pool", "In", "big"), term("pool", "In", "small"))}, None),
    ({"affinity": asking(term("pool", "NotIn", "big", "old"))}, B),
    ({"affinity": asking(term("pool", "DoesNotExist"))}, B),
    ({"affinity": asking(term("pool", "Exists"))}, None),
    ({"affinity": asking(term("memory", "Gt", "100"))}, A),
    ({"affinity": asking(term("memory", "Lt", "100"))}, None),
    ({"affinity": asking(term("memory", "Gt", "100")), "nodeSelector": {"pool": "big"}}, A),
    ({"affinity": asking(term("memory", "Lt", f"{2**63 - 1}")), "nodeSelector": {"pool": "big"}}, A),
    ({"affinity": asking(term("memory", "Gt", f"-{2**63}")), "nodeSelector": {"pool": "big"}}, A),
    ({"affinity": asking(term("memory", "Lt", f"{2**63}")), "nodeSelector": {"pool": "big"}}, None),
    ({"affinity": asking(term("memory", "Gt", f"-{2**63 + 1}")), "nodeSelector": {"pool": "big"}}, None),
    ({"affinity": asking(term("memory", "Gt", "x"))}, None),
    ({"affinity": asking(term("metadata.name", "In", "n4", kind="matchFields"))}, B),
    ({"affinity": asking(term("metadata.name", "In", "n2", kind="matchFields"))}, A),
    ({"affinity": asking(term("metadata.name", "In", "n9", kind="matchFields"))}, None),
    ({"affinity": asking(new_node("pool", "big"))}, A),
    ({"affinity": asking(new_node(CLASS, "l40s"))}, B),
    ({"affinity": asking(new_node(CLASS, "l40s"), {"matchFields": field("In", "n1")})}, None),
    ({"affinity": asking({"matchFields": [*field("In", "n9"), *field("In", "n4")]})}, B),
    ({"affinity": asking(term("pool", "In", "small") | {"matchFields": field("NotIn", "n9")})}, B),
    ({"affinity": asking(term("pool", "In", "small") | {"matchFields": field("NotIn", "n4")})}, None),
    ({"affinity": asking(term("pool", "In", "old") | {"matchFields": field("NotIn", "n3")})}, None),
    ({"affinity": asking(term("pool", "In", "big") | {"matchFields": field("NotIn", "n1")})}, A),
    ({"affinity": asking({}, term("pool", "In", "big"))}, A),
    ({"affinity": asking({})}, None),
    ({"affinity": asking()}, None),
    ({"affinity": asking(term("unknown", "In", "x")), "nodeSelector": {"pool": "big"}}, A),
    ({"affinity": asking(term("pool", "In", "big", *map(str, range(999))))}, A),
    ({"affinity": asking({"matchExpressions": term("pool", "In", "big")["matchExpressions"] * 40})}, A),
    ({"affinity": asking(term("pool", "Later", "x")), "nodeSelector": {"pool": "big"}}, A),
]
# Pods that a policy refuses, and the start of the reason.
REFUSED = [
    (
        pod(NAME),
        f"{NAME}: the nodes that the pod may run on need different images: h200, h100, l40s, cpu; select",
    ),
    (pod(NAME, nodeSelector={"zone": "z"}), f"{NAME}: no image fits the nodes that the pod may run on: cpu"),
    (pod(NAME, nodeSelector={"pool": "x"}), f"{NAME}: no class of nodes matches the pod's node selector"),
    (pod(*[NAME] * 41, nodeSelector={"pool": "big"}), f"{NAME}: the pod has more than 40 containers"),
    (
        pod(NAME, affinity=asking({"matchExpressions": [*term("pool", "Exists")["matchExpressions"] * 41]})),
        f"{NAME}: the pod has more than 40 containers, node selector terms or requirements in a term",
    ),
    (
        pod(NAME, affinity=asking(term("pool", "In", "big", *map(str, range(1_000))))),
        f"{NAME}: {WIDE}",
    ),
]


def review(given_pod, operation="CREATE", subresource=None, **request):
    """Return an AdmissionReview as an API server sends it."""
    body = {
        "uid": "1-2-3",
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "operation": operation,
        "namespace": "default",
        "name": "p",
        "object": given_pod,
        **({"subResource": subresource} if subresource else {}),
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": body | request}
