"""The admission policy for one image on a cluster, with the classes of nodes from which it follows."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.integrations.kubernetes.admission.admission import AdmissionPolicy, make_policy
from imagematrix.integrations.kubernetes.nodes.classes import Classes, classify_nodes
from imagematrix.integrations.kubernetes.nodes.labels import CLASS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.integrations.kubernetes.nodes.nodes import ClusterNode
    from imagematrix.selection.query import Where


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClusterPolicy:
    """The classes of a cluster with their images from one catalog, and the policy for pods that follows.

    `unlabelled` are the names of nodes whose class label is missing or does not match their other labels: no
    pod that gets an image can start there.
    """

    node_classes: Classes
    policy: AdmissionPolicy
    unlabelled: tuple[str, ...] = ()


def make_cluster_policy(
    nodes: Sequence[ClusterNode],
    catalog: Catalog,
    *,
    name: str | None = None,
    deny: bool = False,
    allow_cpu: bool = False,
    where: Where | None = None,
) -> ClusterPolicy:
    """Return the ClusterPolicy of a cluster; `name` is what pods call the image, by default IMAGE:VERSION.

    The other options are those of `classify_nodes` and `make_policy`, and so are the errors.
    """
    # A class label can be missing or wrong while a node starts or gets another driver. No pod with the image
    # of a class can start there, because the affinity of the pod requires the class label.
    unlabelled = [node.name for node in nodes if node.labels.get(CLASS) != node.class_name]
    labelled = [node for node in nodes if node.labels.get(CLASS) == node.class_name]
    node_classes = classify_nodes(labelled, catalog, allow_cpu=allow_cpu, where=where)
    policy = make_policy(name or f"{catalog.image}:{catalog.version}", node_classes, deny=deny)
    return ClusterPolicy(node_classes=node_classes, policy=policy, unlabelled=tuple(unlabelled))
