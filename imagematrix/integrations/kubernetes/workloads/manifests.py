"""Manifests that run a workload on the nodes of each class, with the image for that class.

Sources: https://jobset.sigs.k8s.io (JobSet, v1alpha2), https://lws.sigs.k8s.io (LeaderWorkerSet, v1) and
https://kueue.sigs.k8s.io (ResourceFlavor, v1beta1).
"""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.client.objects import DNS_LABEL, make_manifest
from imagematrix.integrations.kubernetes.nodes.labels import CLASS
from imagematrix.integrations.kubernetes.workloads.affinity import make_affinity
from imagematrix.integrations.kubernetes.workloads.placement import (
    place_gang,
    place_per_class,
    place_per_node,
    require_labels,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from imagematrix.integrations.kubernetes.client.objects import Manifest
    from imagematrix.integrations.kubernetes.nodes.classes import NodeClass
    from imagematrix.integrations.kubernetes.workloads.placement import Placement

LONGEST = 63
HASH = 8  # characters of the hash at the end of a class's name
LABEL = "app.kubernetes.io/name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What to run: a name, arguments for the image's program, GPUs for each pod, and how many pods.

    `resource` is the cluster's resource name for GPUs. `pull_secret` names the Secret with the credentials
    for the image's registry.
    """

    name: str
    arguments: tuple[str, ...] = ()
    gpus: int | None = None
    resource: str = "nvidia.com/gpu"
    pods: int = 1
    pull_secret: str | None = None

    def __post_init__(self) -> None:
        _require_name(self.name)


def make_workload_manifests(kind: str, workload: Workload, classes: Sequence[NodeClass]) -> list[Manifest]:
    """Return the manifests of a workload: one for each class, or a single one for a gang.

    Raises NothingFits if no class gets an image, or no image fits all ranks of a gang; UsageError if labels
    do not distinguish the nodes of a class from others, or if the workload's name is too long for its kind.
    """
    make, place, make_suffix = WORKLOADS[kind]
    placements = place(classes)
    names = name_objects(workload.name, placements, suffix=len(make_suffix(workload.pods)))
    return [make(workload, name, placement) for name, placement in zip(names, placements, strict=True)]


def name_objects(name: str, placements: Sequence[Placement], *, suffix: int = 0) -> list[str]:
    """Return the name of each object of a workload: its own, and of several, with the class.

    Raises UsageError if the name is invalid, or too long for pods with so long a suffix.
    """
    _require_name(name)
    longest = LONGEST - suffix
    if len(placements) > 1:
        # Long names lose their middle, and keep the hash at the end of the class's name.
        start = name[: longest - HASH - 1].rstrip("-")
        rest = longest - len(start) - 1
        return [f"{start}-{placement.classes[0].name[-rest:].strip('-')}" for placement in placements]
    if len(name) > longest:
        raise UsageError(
            f"invalid name {name}: the names of its pods would have more than {LONGEST} characters",
            remedy=f"use at most {longest} characters, such as --name train",
        )
    return [name]


def _require_name(name: str) -> None:
    """Raise UsageError if a workload cannot have this name."""
    if not DNS_LABEL.fullmatch(name):
        raise UsageError(
            f"invalid name {name[:80]!r}",
            remedy="use at most 63 of a-z, 0-9 and -, such as --name train",
        )


def make_flavors(classes: Sequence[NodeClass]) -> Iterator[Manifest]:
    """Yield a ResourceFlavor for each class; Kueue copies its label into the pods that it admits."""
    require_labels(classes)
    for node_class in classes:
        if not node_class.is_labelled:
            raise UsageError(
                f"nodes of the class {node_class.name} lack the label {CLASS}",
                remedy="label them with `imagematrix kubernetes labels`",
            )
        spec = {"nodeLabels": {CLASS: node_class.name}}
        yield make_manifest("kueue.x-k8s.io/v1beta1", "ResourceFlavor", node_class.name, spec=spec)


def make_pull_secrets(secret: str | None) -> Manifest:
    """Return the fields of a pod's spec that name the Secret for pulling its images, if there is one."""
    return {"imagePullSecrets": [{"name": secret}]} if secret else {}


def make_security_context() -> Manifest:
    """Return the security context of a container that needs no privileges and no files of its own."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def make_template(name: str, pod: Manifest) -> Manifest:
    """Return the template of pods with the label `name`."""
    return {"metadata": {"labels": {LABEL: name}}, "spec": pod}


def make_selector_and_template(name: str, pod: Manifest) -> Manifest:
    """Return the fields of a workload that select its pods, and their template."""
    return {"selector": {"matchLabels": {LABEL: name}}, "template": make_template(name, pod)}


def _make_job(workload: Workload, name: str, placement: Placement) -> Manifest:
    labels = {LABEL: workload.name}
    return make_manifest("batch/v1", "Job", name, labels=labels, spec=_make_job_spec(workload, placement))


def _make_job_spec(workload: Workload, placement: Placement) -> Manifest:
    many = {"completions": workload.pods, "parallelism": workload.pods, "completionMode": "Indexed"}
    return {
        **(many if workload.pods > 1 else {}),
        "template": make_template(
            workload.name, {"restartPolicy": "Never", **_make_pod(workload, placement)}
        ),
    }


def _make_deployment(workload: Workload, name: str, placement: Placement) -> Manifest:
    pod = _make_pod(workload, placement)
    spec = {"replicas": workload.pods, **make_selector_and_template(name, pod)}
    return make_manifest("apps/v1", "Deployment", name, labels={LABEL: workload.name}, spec=spec)


def _make_daemonset(workload: Workload, name: str, placement: Placement) -> Manifest:
    spec = make_selector_and_template(name, _make_pod(workload, placement))
    return make_manifest("apps/v1", "DaemonSet", name, labels={LABEL: workload.name}, spec=spec)


def _make_jobset(workload: Workload, name: str, placement: Placement) -> Manifest:
    job = {"name": "ranks", "replicas": 1, "template": {"spec": _make_job_spec(workload, placement)}}
    labels, spec = {LABEL: workload.name}, {"replicatedJobs": [job]}
    return make_manifest("jobset.x-k8s.io/v1alpha2", "JobSet", name, labels=labels, spec=spec)


def _make_leaderworkerset(workload: Workload, name: str, placement: Placement) -> Manifest:
    worker = make_template(workload.name, _make_pod(workload, placement))
    template = {"size": workload.pods, "workerTemplate": worker}
    labels, spec = {LABEL: workload.name}, {"replicas": 1, "leaderWorkerTemplate": template}
    return make_manifest("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", name, labels=labels, spec=spec)


def _make_index_variable(pods: int) -> str:
    return f"-{pods - 1}" if pods > 1 else ""


def _place_together(classes: Sequence[NodeClass]) -> tuple[Placement, ...]:
    return (place_gang(classes),)


# By name on the command line: the functions that make the manifest and place the classes, and the longest
# suffix that controllers add to the name for so many pods: names and labels of pods have at most 63
# characters. A LeaderWorkerSet consists of StatefulSets, which add a hash for a label.
WORKLOADS: dict[
    str,
    tuple[
        Callable[[Workload, str, Placement], Manifest],
        Callable[[Sequence[NodeClass]], tuple[Placement, ...]],
        Callable[[int], str],
    ],
] = {
    "job": (_make_job, place_per_class, _make_index_variable),
    "deployment": (_make_deployment, place_per_class, lambda _: ""),
    "daemonset": (_make_daemonset, place_per_node, lambda _: ""),
    "jobset": (_make_jobset, _place_together, lambda pods: f"-ranks-0{_make_index_variable(max(pods, 2))}"),
    "leaderworkerset": (_make_leaderworkerset, _place_together, lambda _: "-0-0123456789"),
}


def _make_pod(workload: Workload, placement: Placement) -> Manifest:
    """Return the fields of a pod. The image needs no mounts and no privileges."""
    gpus = workload.gpus if placement.variant.gpu else None
    container = {
        "name": workload.name,
        "image": placement.image,
        **({"args": list(workload.arguments)} if workload.arguments else {}),
        **({"resources": {"limits": {workload.resource: str(gpus)}}} if gpus else {}),
    }
    return {
        **make_pull_secrets(workload.pull_secret),
        "affinity": make_affinity(placement.terms),
        "containers": [container],
    }
