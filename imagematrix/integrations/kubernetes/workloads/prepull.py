"""Manifests that pull the image of each class to its nodes before a pod needs it.

Only running a container of an image makes every kubelet pull it, and an image may have neither a shell nor
any other program. So the program that the container runs comes from a ConfigMap, and ends at once.
"""

from __future__ import annotations

import base64

from imagematrix.integrations.kubernetes.client.objects import make_manifest
from imagematrix.integrations.kubernetes.workloads.affinity import make_affinity
from imagematrix.integrations.kubernetes.workloads.manifests import (
    LABEL,
    make_pull_secrets,
    make_security_context,
    make_template,
    name_objects,
)
from imagematrix.integrations.kubernetes.workloads.noop_binary import make_noop_binary
from imagematrix.integrations.kubernetes.workloads.placement import place_per_node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.integrations.kubernetes.client.objects import Manifest
    from imagematrix.integrations.kubernetes.nodes.classes import NodeClass
    from imagematrix.integrations.kubernetes.workloads.placement import Placement

USER = 65532  # no image needs an entry for it in /etc/passwd
FOLDER = "/imagematrix"
REQUESTS = {"cpu": "1m", "memory": "8Mi"}


def make_prepull_manifests(
    name: str,
    classes: Sequence[NodeClass],
    *,
    pause: str,
    pull_secret: str | None = None,
    at_once: int | None = None,
) -> list[Manifest]:
    """Return a ConfigMap with the program, and a DaemonSet for each class that gets an image.

    `pause` is the image of the container that stays: a DaemonSet starts a pod again that ends. At most
    `at_once` nodes of a class pull a new version at the same time, by default all of them. Raises
    NothingFits if no class gets an image; UsageError if labels do not distinguish the nodes of a class from
    others, or the name is invalid.
    """
    placements = place_per_node(classes)
    names = name_objects(name, placements)
    programs = {
        arch: base64.b64encode(make_noop_binary(arch)).decode()
        for arch in sorted({_get_arch(placement) for placement in placements})
    }
    return [
        make_manifest("v1", "ConfigMap", name, labels={LABEL: name}, binaryData=programs),
        *(
            _make_daemonset(
                name, daemonset_name, placement, pause=pause, pull_secret=pull_secret, at_once=at_once
            )
            for daemonset_name, placement in zip(names, placements, strict=True)
        ),
    ]


def _make_daemonset(
    name: str,
    daemonset_name: str,
    placement: Placement,
    *,
    pause: str,
    pull_secret: str | None,
    at_once: int | None,
) -> Manifest:
    shared = {"resources": {"requests": REQUESTS}, "securityContext": make_security_context()}
    pull_container = {
        "name": "pull",
        "image": placement.image,
        "command": [f"{FOLDER}/{_get_arch(placement)}"],
        "workingDir": "/",  # that of the image may be closed to this user
        **shared,
        "volumeMounts": [{"name": "program", "mountPath": FOLDER, "readOnly": True}],
    }
    user = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER}
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **make_pull_secrets(pull_secret),
        "securityContext": {**user, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": 1,
        "tolerations": [{"operator": "Exists"}],  # nodes with GPUs are often tainted
        "affinity": make_affinity(placement.terms),
        "initContainers": [pull_container],
        "containers": [{"name": "pause", "image": pause, **shared}],
        "volumes": [{"name": "program", "configMap": {"name": name, "defaultMode": 0o555}}],
    }
    # Kubernetes' own default would let one node after another pull a new version.
    update = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": at_once or "100%"}}
    spec = {
        "selector": {"matchLabels": {LABEL: daemonset_name}},
        "updateStrategy": update,
        "template": make_template(daemonset_name, pod),
    }
    return make_manifest("apps/v1", "DaemonSet", daemonset_name, labels={LABEL: name}, spec=spec)


def _get_arch(placement: Placement) -> str:
    return placement.variant.platform.split("/")[1]
