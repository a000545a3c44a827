"""Why a pod that uses one of our images got no image, or cannot be placed: in words, for each class of nodes.

`explain_pod` is a pure function of a pod and the ClusterPolicies of a cluster. What it says of images is what
`admission.admit_by_all` decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

from imagematrix.common.text import shorten_words
from imagematrix.integrations.kubernetes.admission.admission import WIDE, WIDEST, admit_by_all, is_too_wide
from imagematrix.integrations.kubernetes.explain.obstacles import Obstacles, count_obstacles
from imagematrix.integrations.kubernetes.workloads.placement import RELABEL, get_image

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Literal

    from imagematrix.integrations.kubernetes.admission.admission import Admission
    from imagematrix.integrations.kubernetes.admission.cluster_policy import ClusterPolicy
    from imagematrix.integrations.kubernetes.explain.obstacles import KnownNodes
    from imagematrix.integrations.kubernetes.explain.pod import Pod
    from imagematrix.integrations.kubernetes.nodes.classes import NodeClass

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
MANY = f"the pod has more than {WIDEST} labels in its node selector, or tolerations"
UNASKED = "the webhook is not asked in kube-system, its own namespace and those of --exclude-namespace"
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
            "obstacles": [
                {"nodes": obstacle.nodes, "why": obstacle.why, "fix": obstacle.fix}
                for obstacle in self.obstacles
            ],
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
            "classes": [verdict.to_json() for verdict in self.classes],
            "left_out": list(self.left_out),
        }


def make_pending_document(pod: Pod, explanations: Iterable[Explanation]) -> dict[str, object]:
    """Return the Pending document."""
    return {
        "schema": SCHEMA,
        "pod": pod.name,
        "phase": pod.phase,
        "node": pod.node,
        "images": [explanation.to_json() for explanation in explanations],
    }


def explain_pod(
    pod: Pod, clusters: Sequence[ClusterPolicy], nodes: KnownNodes, *, in_detail: bool = True
) -> tuple[Explanation, ...]:
    """Return what is wrong with a pod, for each of the images of some catalogs that it uses.

    A pod that is too wide for admission is not compared with nodes. Unless `in_detail`, it is compared only
    with those that could take it, and the explanations have no `classes`.
    """
    excess = _find_excess(pod)
    admissions = {} if excess else admit_by_all(pod.document, [cluster.policy for cluster in clusters])
    explanations = []
    for cluster in clusters:
        images = _find_variant_images(pod, cluster)
        is_used = cluster.policy.name in pod.images
        if excess and (is_used or images):
            explanations.append(_explain_excess(pod, cluster, excess))
        elif is_used or images:
            admission = admissions[cluster.policy.name] if is_used else None
            explanations.append(_explain_image(pod, cluster, images, admission, nodes, in_detail=in_detail))
    return tuple(explanations)


def _explain_excess(pod: Pod, cluster: ClusterPolicy, excess: str) -> Explanation:
    is_undecided = excess == WIDE and cluster.policy.name in pod.images and pod.phase not in ENDED
    return Explanation(
        image=cluster.policy.name,
        cause="ImageUndecided" if is_undecided else None,
        summary=f"{cluster.policy.name}: {excess}",
        fix=None,
        classes=(),
        left_out=cluster.unlabelled,
    )


def _explain_image(
    pod: Pod,
    cluster: ClusterPolicy,
    images: frozenset[str],
    admission: Admission | None,
    nodes: KnownNodes,
    *,
    in_detail: bool,
) -> Explanation:
    """Return what is wrong with a pod that has images of variants, or about whose image admission decides."""
    judge = cache(partial(_judge_class, pod, nodes))
    classes = cluster.node_classes.classes
    if pod.phase in ENDED:
        problem: Problem = None, "the pod has ended", None
    elif admission:
        problem = _explain_undecided(cluster, admission, judge)
    else:
        problem = _explain_decided(pod, images, classes, judge)
    cause, summary, fix = problem
    return Explanation(
        image=cluster.policy.name,
        cause=cause,
        summary=summary,
        fix=fix or (RELABEL if cause in LACKING and cluster.unlabelled else None),
        classes=tuple(map(judge, classes)) if in_detail else (),
        left_out=cluster.unlabelled,
    )


def _find_excess(pod: Pod) -> str | None:
    """Return what a pod has so much of that comparing it with all nodes would take minutes, or None."""
    if is_too_wide(pod.document["spec"]):
        return WIDE
    return MANY if max(len(pod.selector), len(pod.tolerations)) > WIDEST else None


def _find_variant_images(pod: Pod, cluster: ClusterPolicy) -> frozenset[str]:
    """Return the images of variants, by all their names, that the pod's containers have."""
    catalog = cluster.node_classes.catalog
    images = set()
    for variant in catalog.variants:
        names = {get_image(variant), variant.reference, f"{catalog.image}@{variant.digest}"}
        if not names.isdisjoint(pod.images):
            images.add(get_image(variant))
    return frozenset(images)


def _judge_class(pod: Pod, nodes: KnownNodes, node_class: NodeClass) -> ClassVerdict:
    found = [*nodes.find_obstacles(pod, node_class)]
    return ClassVerdict(
        name=node_class.name,
        nodes=tuple(node.name for node in node_class.nodes),
        able=sum(count for obstacles, count in found if not obstacles),
        obstacles=count_obstacles((obstacle, count) for obstacles, count in found for obstacle in obstacles),
        selected=_get_class_image(node_class),
        why=node_class.why,
        fix=node_class.miss.shown if node_class.miss else None,
    )


def _get_class_image(node_class: NodeClass) -> str | None:
    return get_image(node_class.variant) if node_class.variant else None


def _explain_undecided(
    cluster: ClusterPolicy, admission: Admission, judge: Callable[[NodeClass], ClassVerdict]
) -> Problem:
    """Return what is wrong with a pod that still has the name, according to what admission says now."""
    if admission.cause is None or admission.reason is None:
        image = next(operation["value"] for operation in admission.patch if operation["op"] == "replace")
        why = f"{cluster.policy.name}: the pod was created without a decision; a new one would get {image}"
        return "NotAdmitted", why, f"see that a policy or the webhook is installed ({UNASKED}); {AGAIN}"
    cause = CAUSES[admission.cause]
    classes = cluster.node_classes.classes
    concerned = [each for each in classes if cause == "NoClassMatches" or each.name in admission.possible]
    possible = [judge(node_class) for node_class in concerned]
    if cause == "ImageUndecided" and possible and not any(verdict.able for verdict in possible):
        # Admission knows the classes, not what else keeps a pod from all of their nodes.
        fix = _find_first_fix(possible)
        return (
            "NoNodeFits",
            f"{cluster.policy.name}: no node can run the pod{_describe_first_obstacles(possible)}",
            fix,
        )
    if cause == "NoImageFits":
        why, fix = possible[0].why, next((verdict.fix for verdict in possible if verdict.fix), None)
        return cause, f"{admission.reason}: {why}", fix
    if cause == "NoClassMatches":
        return cause, f"{admission.reason}{_describe_first_obstacles(possible)}", None
    return cause, admission.reason, None


def _explain_decided(
    pod: Pod,
    images: frozenset[str],
    classes: Iterable[NodeClass],
    judge: Callable[[NodeClass], ClassVerdict],
) -> Problem:
    """Return what is wrong with a pod that has the image of a class."""
    image = shorten_words(sorted(images), 1)
    concerned = [node_class for node_class in classes if _get_class_image(node_class) in images]
    if pod.node and any(pod.node == node.name for node_class in concerned for node in node_class.nodes):
        return None, f"the pod has {image}, which fits its node {pod.node}", None
    matching = [judge(node_class) for node_class in concerned]
    if not matching:
        why = f"{image}: no class of nodes gets this image any more, as after an upgrade of a driver"
        return "ImageOutdated", why, f"{AGAIN}, so that it gets the image of today's nodes"
    able = [verdict for verdict in matching if verdict.able]
    if able:
        which = shorten_words(
            [f"{verdict.name} ({verdict.able} of {len(verdict.nodes)} nodes)" for verdict in able], SHOWN
        )
        claims = ", and its resource claims were not looked at" if pod.claims else ""
        return None, f"{image}: nothing keeps the pod from nodes of {which}{claims}", None
    why = f"{image}: no node can run the pod{_describe_first_obstacles(matching)}"
    return "NoNodeFits", why, _find_first_fix(matching)


def _find_first_fix(verdicts: Iterable[ClassVerdict]) -> str | None:
    """Return what to do about the first obstacle about which something can be done."""
    obstacles = (obstacle for verdict in verdicts for obstacle in verdict.obstacles)
    return next((obstacle.fix for obstacle in obstacles if obstacle.fix), None)


def _describe_first_obstacles(verdicts: Iterable[ClassVerdict]) -> str:
    """Return the most frequent obstacle of each of some classes, as the end of a sentence."""
    whys = [f"{verdict.name}: {verdict.obstacles[0].why}" for verdict in verdicts if verdict.obstacles]
    return f": {shorten_words(whys, SHOWN, '; ', '; and {} more')}" if whys else ""
