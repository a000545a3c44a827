"""Manifests that run a workload on the nodes of each class, with the image for that class.

Sources: https://jobset.sigs.k8s.io (JobSet, v1alpha2), https://lws.sigs.k8s.io (LeaderWorkerSet, v1) and
https://kueue.sigs.k8s.io (ResourceFlavor, v1beta1).
"""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.client.objects import DNS_LABEL, manifest
from imagematrix.integrations.kubernetes.nodes.labels import CLASS
from imagematrix.integrations.kubernetes.workloads.affinity import affinity
from imagematrix.integrations.kubernetes.workloads.placed import for_each, for_gang, require_labels

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from imagematrix.integrations.kubernetes.client.objects import Manifest
    from imagematrix.integrations.kubernetes.nodes.classes import Class
    from imagematrix.integrations.kubernetes.workloads.placed import Placed

__all__ = ["LABEL", "WORKLOADS", "Workload", "flavors", "manifests", "names_of", "pulling"]

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


def manifests(kind: str, workload: Workload, classes: Sequence[Class]) -> list[Manifest]:
    """Return the manifests of a workload: one for each class, or a single one for a gang.

    Raises NothingFits if no class gets an image, or no image fits all ranks of a gang; UsageError if labels
    do not distinguish the nodes of a class from others, or if the workload's name is too long for its kind.
    """
    make, together, suffix = WORKLOADS[kind]
    placed = [for_gang(classes)] if together else for_each(classes)
    names = names_of(workload.name, placed, suffix=len(suffix(workload.pods)))
    return [make(workload, name, each) for name, each in zip(names, placed, strict=True)]


def names_of(name: str, placed: Sequence[Placed], *, suffix: int = 0) -> list[str]:
    """Return the name of each object of a workload: its own, and of several, with the class.

    Raises UsageError if the name is invalid, or too long for pods with so long a suffix.
    """
    _require_name(name)
    longest = LONGEST - suffix
    if len(placed) > 1:
        return [_joined(name, each.classes[0].name, longest) for each in placed]
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


def flavors(classes: Sequence[Class]) -> Iterator[Manifest]:
    """Yield a ResourceFlavor for each class; Kueue copies its label into the pods that it admits."""
    require_labels(classes)
    for each in classes:
        if not each.labelled:
            raise UsageError(
                f"nodes of the class {each.name} lack the label {CLASS}",
                remedy="label them with `imagematrix kubernetes labels`",
            )
        spec = {"nodeLabels": {CLASS: each.name}}
        yield manifest("kueue.x-k8s.io/v1beta1", "ResourceFlavor", each.name, spec=spec)


def pulling(secret: str | None) -> Manifest:
    """Return the fields of a pod's spec that name the Secret for pulling its images, if there is one."""
    return {"imagePullSecrets": [{"name": secret}]} if secret else {}


def _job(workload: Workload, name: str, placed: Placed) -> Manifest:
    labels = {LABEL: workload.name}
    return manifest("batch/v1", "Job", name, labels=labels, spec=_job_spec(workload, placed))


def _job_spec(workload: Workload, placed: Placed) -> Manifest:
    many = {"completions": workload.pods, "parallelism": workload.pods, "completionMode": "Indexed"}
    return {
        **(many if workload.pods > 1 else {}),
        "template": _pod(workload, placed, restartPolicy="Never"),
    }


def _deployment(workload: Workload, name: str, placed: Placed) -> Manifest:
    spec = {"replicas": workload.pods, **_selecting(workload, name, placed)}
    return manifest("apps/v1", "Deployment", name, labels={LABEL: workload.name}, spec=spec)


def _daemonset(workload: Workload, name: str, placed: Placed) -> Manifest:
    spec = _selecting(workload, name, placed)
    return manifest("apps/v1", "DaemonSet", name, labels={LABEL: workload.name}, spec=spec)


def _selecting(workload: Workload, name: str, placed: Placed) -> Manifest:
    return {"selector": {"matchLabels": {LABEL: name}}, "template": _pod(workload, placed, name)}


def _jobset(workload: Workload, name: str, placed: Placed) -> Manifest:
    job = {"name": "ranks", "replicas": 1, "template": {"spec": _job_spec(workload, placed)}}
    labels, spec = {LABEL: workload.name}, {"replicatedJobs": [job]}
    return manifest("jobset.x-k8s.io/v1alpha2", "JobSet", name, labels=labels, spec=spec)


def _leaderworkerset(workload: Workload, name: str, placed: Placed) -> Manifest:
    template = {"size": workload.pods, "workerTemplate": _pod(workload, placed)}
    labels, spec = {LABEL: workload.name}, {"replicas": 1, "leaderWorkerTemplate": template}
    return manifest("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", name, labels=labels, spec=spec)


def _index(pods: int) -> str:
    return f"-{pods - 1}" if pods > 1 else ""


# By name on the command line: the function that makes the manifest, whether all pods get one image, and the
# longest suffix that controllers add to the name for so many pods: names and labels of pods have at most 63
# characters. A LeaderWorkerSet consists of StatefulSets, which add a hash for a label.
WORKLOADS: dict[str, tuple[Callable[[Workload, str, Placed], Manifest], bool, Callable[[int], str]]] = {
    "job": (_job, False, _index),
    "deployment": (_deployment, False, lambda _: ""),
    "daemonset": (_daemonset, False, lambda _: ""),
    "jobset": (_jobset, True, lambda pods: f"-ranks-0{_index(max(pods, 2))}"),
    "leaderworkerset": (_leaderworkerset, True, lambda _: "-0-0123456789"),
}


def _pod(workload: Workload, placed: Placed, name: str | None = None, **spec: object) -> Manifest:
    """Return the template of a pod. The image needs no mounts and no privileges."""
    gpus = workload.gpus if placed.variant.gpu else None
    container = {
        "name": workload.name,
        "image": placed.image,
        **({"args": list(workload.arguments)} if workload.arguments else {}),
        **({"resources": {"limits": {workload.resource: str(gpus)}}} if gpus else {}),
    }
    return {
        "metadata": {"labels": {LABEL: name or workload.name}},
        "spec": {
            **spec,
            **pulling(workload.pull_secret),
            "affinity": affinity(placed.terms),
            "containers": [container],
        },
    }


def _joined(name: str, class_name: str, longest: int) -> str:
    """Return the names of a workload and a class, joined. Long names lose their middle and keep the hash."""
    start = name[: longest - HASH - 1].rstrip("-")
    return f"{start}-{class_name[-(longest - len(start) - 1) :].strip('-')}"
