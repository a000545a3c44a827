"""Why a pod that uses one of our images got no image, or cannot be placed: in words, for each class of nodes.

`explain_pod` is a pure function of a pod and the ClusterPolicy of a cluster. What it says of images is what
`admission.admit` decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.common.text import shorten_words
from imagematrix.integrations.kubernetes.admission.admission import admit
from imagematrix.integrations.kubernetes.explain.obstacles import Obstacles, count_obstacles, find_obstacles
from imagematrix.integrations.kubernetes.workloads.placement import RELABEL, get_image

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Literal

    from imagematrix.integrations.kubernetes.admission.admission import Admission
    from imagematrix.integrations.kubernetes.admission.cluster_policy import ClusterPolicy
    from imagematrix.integrations.kubernetes.explain.pod import Pod
    from imagematrix.integrations.kubernetes.nodes.classes import NodeClass
    from imagematrix.integrations.kubernetes.nodes.nodes import ClusterNode

    Cause = Literal[
        "NoImageFits", "ImageUndecided", "NoClassMatches", "NotAdmitted", "ImageOutdated", "NoNodeFits"
    ]
    Problem = tuple[Cause | None, str, str | None]  # with the sentence, and what to do about it

SCHEMA = "imagematrix.pending/v1"
CAUSES: Mapping[str, Cause] = {
    "wide": "ImageUndecided",
    "nowhere": "NoClassMatches",
    "nothing": "NoImageFits",
    "several": "ImageUndecided",
}
LACKING: tuple[Cause, ...] = ("NoClassMatches", "NoImageFits", "NoNodeFits")  # more nodes could help
ENDED = ("Succeeded", "Failed")
SHOWN = 3  # classes, or nodes, that a sentence names
AGAIN = "delete the pod, and create it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassVerdict:
    """A class: how many of its nodes could take the pod, why others cannot, and which image the class gets.

    `selected` is the reference with the digest, or None. Then `why` says why nothing fits, and `fix` what
    would help, or is None.
    """

    name: str
    nodes: tuple[str, ...]
    able: int
    obstacles: tuple[Obstacles, ...]
    selected: str | None
    why: str
    fix: str | None

    def to_json(self) -> dict[str, object]:
        """Return one element of `classes` in the Pending document."""
        return {
            "name": self.name,
            "nodes": len(self.nodes),
            "able": self.able,
            "obstacles": [{"nodes": each.nodes, "why": each.why, "fix": each.fix} for each in self.obstacles],
            "selected": self.selected,
            "why": self.why,
            "fix": self.fix,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What is wrong with a pod that uses an image: a sentence, what to do about it, and the details by class.

    `image` is the name that the policy replaces. `cause` is the kind of problem in one word, or None if there
    is none that we know of.
    """

    image: str
    cause: Cause | None
    summary: str
    fix: str | None
    classes: tuple[ClassVerdict, ...]
    left_out: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """Return one element of `images` in the Pending document."""
        return {
            "image": self.image,
            "cause": self.cause,
            "summary": self.summary,
            "fix": self.fix,
            "classes": [each.to_json() for each in self.classes],
            "left_out": list(self.left_out),
        }


def make_pending_document(pod: Pod, explanations: Iterable[Explanation]) -> dict[str, object]:
    """Return the Pending document."""
    return {
        "schema": SCHEMA,
        "pod": pod.name,
        "phase": pod.phase,
        "node": pod.node,
        "images": [each.to_json() for each in explanations],
    }


def explain_pod(
    pod: Pod,
    cluster: ClusterPolicy,
    nodes: Mapping[str, ClusterNode],
    used: Mapping[str, Mapping[str, int]],
) -> Explanation | None:
    """Return what is wrong with a pod, or None if it does not use the image.

    `nodes` are the nodes by name as they are now, and `used` the GPUs that the pods of each node request,
    where that is known.
    """
    bearing = _find_variant_images(pod, cluster)
    if cluster.policy.name not in pod.images and not bearing:
        return None
    verdicts = tuple(_judge_class(pod, each, nodes, used) for each in cluster.grouped.classes)
    if pod.phase in ENDED:
        problem: Problem = None, "the pod has ended", None
    elif cluster.policy.name in pod.images:
        problem = _explain_undecided(cluster, admit(pod.document, cluster.policy), verdicts)
    else:
        problem = _explain_decided(pod, bearing, verdicts)
    cause, summary, fix = problem
    return Explanation(
        image=cluster.policy.name,
        cause=cause,
        summary=summary,
        fix=fix or (RELABEL if cause in LACKING and cluster.left_out else None),
        classes=verdicts,
        left_out=cluster.left_out,
    )


def _find_variant_images(pod: Pod, cluster: ClusterPolicy) -> frozenset[str]:
    """Return the images of variants, by all their names, that the pod's containers have."""
    catalog = cluster.grouped.catalog
    borne = set()
    for variant in catalog.variants:
        names = {get_image(variant), variant.reference, f"{catalog.image}@{variant.digest}"}
        if not names.isdisjoint(pod.images):
            borne.add(get_image(variant))
    return frozenset(borne)


def _judge_class(
    pod: Pod,
    each: NodeClass,
    nodes: Mapping[str, ClusterNode],
    used: Mapping[str, Mapping[str, int]],
) -> ClassVerdict:
    found = [find_obstacles(pod, nodes.get(node.name, node), used.get(node.name, {})) for node in each.nodes]
    return ClassVerdict(
        name=each.name,
        nodes=tuple(node.name for node in each.nodes),
        able=sum(not some for some in found),
        obstacles=count_obstacles(obstacle for some in found for obstacle in some),
        selected=get_image(each.variant) if each.variant else None,
        why=each.why,
        fix=each.miss.shown if each.miss else None,
    )


def _explain_undecided(
    cluster: ClusterPolicy, admission: Admission, verdicts: Iterable[ClassVerdict]
) -> Problem:
    """Return what is wrong with a pod that still has the name, according to what admission says now."""
    if admission.cause is None or admission.reason is None:
        decided = next(each["value"] for each in admission.patch if each["op"] == "replace")
        why = f"{cluster.policy.name}: the pod was created without a decision; a new one would get {decided}"
        return "NotAdmitted", why, f"see that a policy or the webhook is installed; {AGAIN}"
    cause = CAUSES[admission.cause]
    by_name = {each.name: each for each in verdicts}
    possible = [by_name[name] for name in admission.possible]
    if cause == "ImageUndecided" and possible and not any(each.able for each in possible):
        # Admission knows the classes, not what else keeps a pod from all of their nodes.
        fix = next((one.fix for each in possible for one in each.obstacles if one.fix), None)
        return (
            "NoNodeFits",
            f"{cluster.policy.name}: no node can run the pod{_describe_first_obstacles(possible)}",
            fix,
        )
    if cause == "NoImageFits":
        why, fix = possible[0].why, next((each.fix for each in possible if each.fix), None)
        return cause, f"{admission.reason}: {why}", fix
    if cause == "NoClassMatches":
        return cause, f"{admission.reason}{_describe_first_obstacles(by_name.values())}", None
    return cause, admission.reason, None


def _explain_decided(pod: Pod, bearing: frozenset[str], verdicts: Iterable[ClassVerdict]) -> Problem:
    """Return what is wrong with a pod that has the image of a class."""
    shown = shorten_words(sorted(bearing), 1)
    getting = [each for each in verdicts if each.selected in bearing]
    if pod.node and any(pod.node in each.nodes for each in getting):
        return None, f"the pod has {shown}, which fits its node {pod.node}", None
    if not getting:
        why = f"{shown}: no class of nodes gets this image any more, as after an upgrade of a driver"
        return "ImageOutdated", why, f"{AGAIN}, so that it gets the image of today's nodes"
    able = [each for each in getting if each.able]
    if able:
        which = shorten_words(
            [f"{each.name} ({each.able} of {len(each.nodes)} nodes)" for each in able], SHOWN
        )
        claims = ", and its resource claims were not looked at" if pod.claims else ""
        return None, f"{shown}: nothing keeps the pod from nodes of {which}{claims}", None
    fix = next((one.fix for each in getting for one in each.obstacles if one.fix), None)
    return "NoNodeFits", f"{shown}: no node can run the pod{_describe_first_obstacles(getting)}", fix


def _describe_first_obstacles(verdicts: Iterable[ClassVerdict]) -> str:
    """Return the most frequent obstacle of each of some classes, as the end of a sentence."""
    whys = [f"{each.name}: {each.obstacles[0].why}" for each in verdicts if each.obstacles]
    return f": {shorten_words(whys, SHOWN, '; ', '; and {} more')}" if whys else ""
