"""Manifests that run the webhook in a cluster, label its nodes, and offer their GPUs.

They need Kubernetes 1.21 or newer: policy/v1, and the label that names each namespace. The DRA driver needs
1.34 or newer: resource.k8s.io/v1.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from pathlib import Path

from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.admission.admission import AdmissionPolicy
from imagematrix.integrations.kubernetes.admission.policy import API, make_rules, make_use_condition
from imagematrix.integrations.kubernetes.client.objects import CONTROL_PLANE, DNS_LABEL, make_manifest
from imagematrix.integrations.kubernetes.dra import cdi, slice_policy, slices
from imagematrix.integrations.kubernetes.webhook.review import PATH
from imagematrix.integrations.kubernetes.workloads.manifests import (
    LABEL,
    make_pull_secrets,
    make_security_context,
    make_selector_and_template,
)
from imagematrix.launcher.gpu_claims.locks import SHARED
from imagematrix.launcher.kubelet import sockets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from imagematrix.integrations.kubernetes.client.objects import Manifest
    from imagematrix.integrations.kubernetes.install.certificates import Tls

NAME = "imagematrix-webhook"
LABELLER, PLUGIN = "imagematrix-labels", "imagematrix-device-plugin"
DRA = "imagematrix-dra-driver"
PART_OF, PRODUCT = "app.kubernetes.io/part-of", "imagematrix"
NAMED = "kubernetes.io/metadata.name"  # the label with the name of a namespace
HOOK = "images.imagematrix.io"
PORT = 8443  # below 1024, it would need a capability, and it has none
HEALTH = 8081  # what the kubelet asks, which no load on the other port delays
MEMORY = "1Gi"  # of the webhook
USER = 65532  # "nonroot" of common base images; it needs no entry in /etc/passwd
FEATURES = "/etc/kubernetes/node-feature-discovery/features.d"
PATH_ON_NODE = re.compile(r"/[^\x00-\x1f:]*")  # Kubernetes allows no colon in the path of a mount
SEEN = ("proc", "sys", "dev")  # folders of a node that the probe reads
REPEAT_S = 300
# NFD ignores hidden files, and a rename is atomic.
LABELLING = (
    "while :; do imagematrix kubernetes labels --root /host > /features/.imagematrix"
    f" && mv /features/.imagematrix /features/imagematrix; sleep {REPEAT_S}; done"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What to install: image versions in a registry, the image with this program, and options.

    `names` are the image versions, `program` is the image with imagematrix. `options` are further arguments
    of the webhook. `pull_secret` names a Secret in the namespace with the registries' credentials. With
    `conditions`, the API server sends only pods that use one of the images (Kubernetes 1.28 and newer).
    `plugin` lists the kinds of resource names, besides imagematrix.io/gpu, under which GPUs are offered; if
    it is None, no device plugin is installed. With `dra` the DRA driver is installed in its place. `kubelet`
    is the root directory of the nodes' kubelets. With `events`, one of the webhooks writes Events about
    pending pods.
    """

    names: tuple[str, ...]
    program: str
    namespace: str = "imagematrix"
    excluded: tuple[str, ...] = ()
    deny: bool = False
    timeout_s: int = 5
    pull_secret: str | None = None
    options: tuple[str, ...] = ()
    conditions: bool = True
    plugin: tuple[str, ...] | None = None
    dra: bool = False
    kubelet: str = sockets.ROOT_DIR
    events: bool = True

    def __post_init__(self) -> None:
        for name in (self.namespace, *self.excluded):
            if not DNS_LABEL.fullmatch(name):
                raise UsageError(f"invalid namespace {name[:80]!r}")
        if self.dra and self.plugin is not None:
            raise UsageError("a node's GPUs are offered by a device plugin or by a DRA driver, not by both")
        if not PATH_ON_NODE.fullmatch(self.kubelet):
            raise UsageError(f"invalid --kubelet: {self.kubelet[:80]!r}", remedy="give an absolute path")


def make_service_names(namespace: str) -> tuple[str, ...]:
    """Return the DNS names of the webhook; the API server uses the first."""
    return f"{NAME}.{namespace}.svc", f"{NAME}.{namespace}.svc.cluster.local"


def make_manifests(installation: Installation, tls: Tls, *, upgrade: bool = False) -> Iterator[Manifest]:
    """Yield the manifests in the order in which to apply them, also to `upgrade` another installation.

    All have a label by which they can be found.
    """
    configuration = _make_configuration(installation, tls)
    # Before there is a webhook, it must not be asked. Before one gets a new certificate, it must be trusted.
    workloads = _make_workloads(installation, tls)
    for manifest in (configuration, *workloads) if upgrade else (*workloads, configuration):
        manifest["metadata"].setdefault("labels", {})[PART_OF] = PRODUCT
        yield manifest


def _make_workloads(installation: Installation, tls: Tls) -> Iterator[Manifest]:
    """Yield the webhook, and what runs on the nodes."""
    space, metadata = installation.namespace, _make_metadata(installation.namespace)
    # API servers set this label from 1.21 on, but the selector below needs it on older servers too.
    yield make_manifest("v1", "Namespace", space, labels={NAMED: space})
    yield from _make_permissions(installation)
    keys = {
        "tls.crt": _encode_base64(tls.chain),
        "tls.key": _encode_base64(tls.key),
        "ca.crt": _encode_base64(tls.authorities),
    }
    yield make_manifest("v1", "Secret", NAME, **metadata, type="kubernetes.io/tls", data=keys)
    yield _make_deployment(installation)
    budget = {"minAvailable": 1, "selector": {"matchLabels": {LABEL: NAME}}}
    yield make_manifest("policy/v1", "PodDisruptionBudget", NAME, **metadata, spec=budget)
    service = {"selector": {LABEL: NAME}, "ports": [{"port": 443, "targetPort": PORT}]}
    yield make_manifest("v1", "Service", NAME, **metadata, spec=service)
    # On each node, what writes its labels for NFD.
    labeller = {"name": "labels", "command": ["sh", "-c", LABELLING]}
    yield _make_daemonset(installation, LABELLER, labeller, {"features": ("/features", FEATURES)})
    if installation.plugin is not None:
        yield _make_plugin(installation)
    if installation.dra:
        yield from _make_dra_driver(installation)


def _make_permissions(installation: Installation) -> Iterator[Manifest]:
    """Yield what the webhook may do in the cluster, and with `events`, in its namespace."""
    rules = [_make_rule("", "nodes", "get", "list", "watch")]
    if installation.events:
        rules += [_make_rule("", "pods", "list", "watch"), _make_rule("", "events", "create")]
    yield from _make_account(installation.namespace, NAME, rules)
    if installation.events:
        metadata = _make_metadata(installation.namespace)
        lease = _make_rule("coordination.k8s.io", "leases", "get", "update") | {"resourceNames": [NAME]}
        yield from _make_role("Role", installation.namespace, NAME, metadata, [lease])
        # It exists from the start, because a right to create Leases cannot be limited to one name.
        yield make_manifest("coordination.k8s.io/v1", "Lease", NAME, **metadata, spec={})


def _make_account(space: str, name: str, rules: list[Manifest]) -> Iterator[Manifest]:
    """Yield a service account, and what it may do in the cluster."""
    yield make_manifest("v1", "ServiceAccount", name, **_make_metadata(space, name))
    yield from _make_role("ClusterRole", space, name, {"labels": {LABEL: name}}, rules)


def _make_role(
    kind: str, space: str, name: str, metadata: Manifest, rules: list[Manifest]
) -> Iterator[Manifest]:
    """Yield a role of a kind, and the binding that gives it to a service account."""
    group = "rbac.authorization.k8s.io"
    yield make_manifest(f"{group}/v1", kind, name, **metadata, rules=rules)
    yield make_manifest(
        f"{group}/v1",
        f"{kind}Binding",
        name,
        **metadata,
        roleRef={"apiGroup": group, "kind": kind, "name": name},
        subjects=[{"kind": "ServiceAccount", "name": name, "namespace": space}],
    )


def _make_rule(group: str, resource: str, *verbs: str) -> Manifest:
    return {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}


def _make_deployment(installation: Installation) -> Manifest:
    secret = installation.pull_secret
    words = ["kubernetes", "webhook", *(word for name in installation.names for word in ("--catalog", name))]
    words += ["--nodes", "cluster", "--tls-cert", "/tls/tls.crt", "--tls-key", "/tls/tls.key"]
    words += ["--listen", f"0.0.0.0:{PORT}", "--health", f"0.0.0.0:{HEALTH}"]
    words += ["--on-unknown", "deny" if installation.deny else "default"]
    if installation.events:
        words += ["--events", NAME]
        words += [word for name in installation.excluded for word in ("--exclude", name)]
    mounts = [{"name": "tls", "mountPath": "/tls", "readOnly": True}]
    volumes: list[Manifest] = [{"name": "tls", "secret": {"secretName": NAME}}]
    if secret:
        mounts.append({"name": "logins", "mountPath": "/logins", "readOnly": True})
        items = [{"key": ".dockerconfigjson", "path": "config.json"}]
        volumes.append({"name": "logins", "secret": {"secretName": secret, "items": items}})
    container = {
        "name": "webhook",
        "image": installation.program,
        "command": ["imagematrix"],
        "args": [*words, *installation.options],
        **({"env": [{"name": "DOCKER_CONFIG", "value": "/logins"}]} if secret else {}),
        "ports": [{"name": "https", "containerPort": PORT}, {"name": "health", "containerPort": HEALTH}],
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": "health"}},
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "health"}, "periodSeconds": 5},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": MEMORY}},
        "securityContext": make_security_context(),
        "volumeMounts": mounts,
    }
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",  # a cluster may have a single node
        "labelSelector": {"matchLabels": {LABEL: NAME}},
    }
    user = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
    pod = {
        "serviceAccountName": NAME,
        **make_pull_secrets(secret),
        "securityContext": {**user, "seccompProfile": {"type": "RuntimeDefault"}},
        "topologySpreadConstraints": [spread],
        "containers": [container],
        "volumes": volumes,
    }
    # An old replica ends only after a new one is ready.
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    spec = {"replicas": 2, "strategy": strategy, **make_selector_and_template(NAME, pod)}
    return make_manifest("apps/v1", "Deployment", NAME, **_make_metadata(installation.namespace), spec=spec)


def _make_plugin(installation: Installation) -> Manifest:
    """Return the DaemonSet that offers each node's GPUs to its kubelet."""
    words = ["kubernetes", "device-plugin", "--root", "/host", "--kubelet", installation.kubelet]
    words += [word for kind in installation.plugin or () for word in ("--by", kind)]
    container = {"name": "device-plugin", "command": ["imagematrix"], "args": words}
    root = installation.kubelet.rstrip("/")
    paths = {
        "devices": sockets.DEVICE_PLUGINS,
        "pods": f"{root}/{sockets.POD_RESOURCES}",
        # Where the DRA driver, and the claims that it has prepared, would be seen.
        "plugins": f"{root}/{sockets.PLUGINS}",
        "cdi": str(cdi.FOLDER),
        "locks": str(Path(SHARED).parent),
    }
    folders = {volume: (path, path) for volume, path in paths.items()}
    return _make_daemonset(installation, PLUGIN, container, folders)


def _make_dra_driver(installation: Installation) -> Iterator[Manifest]:
    """Yield what publishes each node's GPUs and prepares claims, and the classes of devices to claim."""
    group = slices.API.partition("/")[0]
    rules = [
        _make_rule(group, "resourceslices", "list", "watch", "create", "update", "delete"),
        _make_rule(group, "resourceclaims", "get"),
        _make_rule("", "nodes", "get"),  # the owners of slices
    ]
    yield from _make_account(installation.namespace, DRA, rules)
    account = f"system:serviceaccount:{installation.namespace}:{DRA}"
    yield from slice_policy.make_slice_policy(DRA, account, labels={LABEL: DRA})
    for kind in (slices.GPU, slices.MIG):
        expression = f'device.driver == "{slices.DRIVER}" && {slices.ATTRIBUTES}.type == "{kind}"'
        spec = {"selectors": [{"cel": {"expression": expression}}]}
        name = f"{kind}.{slices.DRIVER.partition('.')[2]}"
        yield make_manifest(slices.API, "DeviceClass", name, labels={LABEL: DRA}, spec=spec)
    container = {
        "name": "dra-driver",
        "command": ["imagematrix"],
        "args": ["kubernetes", "dra-driver", "--root", "/host", "--kubelet", installation.kubelet],
        "env": [{"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
    }
    root = installation.kubelet.rstrip("/")
    paths = {
        "plugins": f"{root}/{sockets.PLUGINS}",
        "registry": f"{root}/{sockets.REGISTRY}",
        "devices": sockets.DEVICE_PLUGINS,  # where our device plugin would be seen
        "pods": f"{root}/{sockets.POD_RESOURCES}",  # and what pods have from it, or from NVIDIA's
        "cdi": str(cdi.FOLDER),
        "locks": str(Path(SHARED).parent),
    }
    folders = {volume: (path, path) for volume, path in paths.items()}
    yield _make_daemonset(installation, DRA, container, folders, account=DRA)


def _make_daemonset(
    installation: Installation,
    name: str,
    container: Manifest,
    folders: Mapping[str, tuple[str, str]],
    account: str | None = None,
) -> Manifest:
    """Return a DaemonSet that can read what the probe reads of a node, and write to some of its folders.

    `folders` maps the name of a volume to its path in the container and its path on the node. The container
    runs as root, which owns the folders, without capabilities. It can use the service `account`, if any.
    """
    read_mounts = [{"name": name, "mountPath": f"/host/{name}", "readOnly": True} for name in SEEN]
    write_mounts = [{"name": name, "mountPath": path} for name, (path, _) in folders.items()]
    read_volumes = [{"name": name, "hostPath": {"path": f"/{name}"}} for name in SEEN]
    write_volumes = [
        {"name": name, "hostPath": {"path": path, "type": "DirectoryOrCreate"}}
        for name, (_, path) in folders.items()
    ]
    pod = {
        **({"serviceAccountName": account} if account else {"automountServiceAccountToken": False}),
        **make_pull_secrets(installation.pull_secret),
        "securityContext": {"runAsUser": 0, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": 1,
        "tolerations": [{"operator": "Exists"}],  # nodes with GPUs are often tainted
        "containers": [
            {
                "image": installation.program,
                "securityContext": make_security_context(),
                "volumeMounts": [*read_mounts, *write_mounts],
                **container,
            }
        ],
        "volumes": [*read_volumes, *write_volumes],
    }
    metadata = _make_metadata(installation.namespace, name)
    return make_manifest("apps/v1", "DaemonSet", name, **metadata, spec=make_selector_and_template(name, pod))


def _make_configuration(installation: Installation, tls: Tls) -> Manifest:
    space = installation.namespace
    # With "Fail", a webhook that is down would keep its own pods, and those of the control plane, from
    # starting.
    excluded = [CONTROL_PLANE, space, *installation.excluded]
    use_condition = " || ".join(
        make_use_condition(AdmissionPolicy(name=name, classes=())) for name in installation.names
    )
    selector = {"key": NAMED, "operator": "NotIn", "values": excluded}
    service = {"name": NAME, "namespace": space, "path": PATH, "port": 443}
    conditions = [{"name": "uses-an-image", "expression": use_condition}]
    hook = {
        "name": HOOK,
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail" if installation.deny else "Ignore",
        "reinvocationPolicy": "IfNeeded",  # a later webhook may add containers; `admit` changes nothing twice
        "timeoutSeconds": installation.timeout_s,
        "namespaceSelector": {"matchExpressions": [selector]},
        **({"matchConditions": conditions} if installation.conditions else {}),
        "rules": make_rules(),
        "clientConfig": {"service": service, "caBundle": _encode_base64(tls.authorities)},
    }
    return make_manifest(API, "MutatingWebhookConfiguration", NAME, labels={LABEL: NAME}, webhooks=[hook])


def _make_metadata(space: str, name: str = NAME) -> Manifest:
    return {"namespace": space, "labels": {LABEL: name}}


def _encode_base64(text: bytes) -> str:
    return base64.b64encode(text).decode()
