"""Manifests that run the webhook: valid, confined, and with options that the program accepts."""

import asyncio
import base64
import os
import ssl
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from aiohttp import web
from celpy.adapter import json_to_cel
from scheduling import Cel

from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.admission.admission import AdmissionPolicy
from imagematrix.integrations.kubernetes.admission.policy import make_use_condition
from imagematrix.integrations.kubernetes.dra import slices
from imagematrix.integrations.kubernetes.install import certificates
from imagematrix.integrations.kubernetes.install.install import (
    LABELLING,
    Installation,
    make_manifests,
    make_service_names,
)
from imagematrix.integrations.kubernetes.webhook.certificate import Certificate
from imagematrix.integrations.kubernetes.webhook.review import PATH

NAME, SECOND = "reg.example.com/ml/t:v1", "reg.example.com/ml/s:v2"
PROGRAM = "reg.example.com/imagematrix:1"
KINDS = [
    *("Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"),
    *("Lease", "Secret", "Deployment", "PodDisruptionBudget", "Service"),
    *("DaemonSet", "MutatingWebhookConfiguration"),
]


@pytest.fixture(scope="module")
def tls():
    return certificates.make_certificate(make_service_names("imagematrix"))


def by_kind(installation, tls):
    return {one["kind"]: one for one in make_manifests(installation, tls)}


def full(**more):
    options = {"names": (NAME, SECOND), "program": PROGRAM, "deny": True, "pull_secret": "logins", **more}
    return Installation(**options)


@pytest.mark.parametrize("release", ["1.34", "1.37"])
@pytest.mark.parametrize(
    ("installation", "without"),
    [
        (full(), ()),
        (full(deny=False, pull_secret=None, conditions=False), ()),
        (full(events=False), ("Role", "RoleBinding", "Lease")),
    ],
)
def test_the_manifests_are_valid(installation, without, tls, release):
    made = list(make_manifests(installation, tls))
    assert [one["kind"] for one in made] == [kind for kind in KINDS if kind not in without]
    for one in made:
        kubernetes_validate.validate(one, release, strict=True)


@pytest.mark.parametrize(
    ("options", "root"), [({}, "/var/lib/kubelet"), ({"kubelet": "/data/kubelet/"}, "/data/kubelet")]
)
def test_the_device_plugin_is_installed_on_request(tls, options, root):
    made = list(make_manifests(full(plugin=("product",), **options), tls))
    labels, plugin = (one for one in made if one["kind"] == "DaemonSet")
    kubernetes_validate.validate(plugin, "1.37", strict=True)
    assert plugin["spec"]["selector"] != labels["spec"]["selector"]
    (container,) = plugin["spec"]["template"]["spec"]["containers"]
    words = ["kubernetes", "device-plugin", "--root", "/host", "--kubelet", options.get("kubelet", root)]
    words += ["--by", "product"]
    assert (container["command"], container["args"]) == (["imagematrix"], words)
    volumes = {one["name"]: one["hostPath"]["path"] for one in plugin["spec"]["template"]["spec"]["volumes"]}
    mounts = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
    seen = {f"/host/{name}": f"/{name}" for name in ("proc", "sys", "dev")}
    # Kubelet and the plugin use the same paths for their sockets. Its --root-dir moves only one of them.
    sockets = ("/var/lib/kubelet/device-plugins", f"{root}/pod-resources")
    # By these it sees a DRA driver, its claims, and launches on the node.
    others = (f"{root}/plugins", "/var/run/cdi", "/run/lock")
    assert mounts == seen | {path: path for path in (*sockets, *others)}
    written = [one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")]
    assert written == [*sockets, *others]


@pytest.mark.parametrize("root", ["/var/lib/kubelet", "/data/kubelet"])
def test_the_dra_driver_is_installed_on_request(tls, root):
    made = list(make_manifests(full(dra=True, kubelet=root), tls))
    for one in made:
        kubernetes_validate.validate(one, "1.37", strict=True)
    ours = {one["kind"]: one for one in made if one["metadata"]["name"] == "imagematrix-dra-driver"}
    assert [*ours] == [
        *("ServiceAccount", "ClusterRole", "ClusterRoleBinding"),
        *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "DaemonSet"),
    ]
    assert {
        (group, resource): rule["verbs"]
        for rule in ours["ClusterRole"]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    } == {
        ("resource.k8s.io", "resourceslices"): ["list", "watch", "create", "update", "delete"],
        ("resource.k8s.io", "resourceclaims"): ["get"],
        ("", "nodes"): ["get"],
    }
    (subject,) = ours["ClusterRoleBinding"]["subjects"]
    (condition,) = ours["ValidatingAdmissionPolicy"]["spec"]["matchConditions"]
    account = f"system:serviceaccount:{subject['namespace']}:{subject['name']}"
    assert condition["expression"] == f'request.userInfo.username == "{account}"'
    pod = ours["DaemonSet"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == subject["name"] == ours["ServiceAccount"]["metadata"]["name"]
    (container,) = pod["containers"]
    assert container["args"] == ["kubernetes", "dra-driver", "--root", "/host", "--kubelet", root]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    # Kubelet, engines and launches on the node use the same paths.
    volumes = {one["name"]: one["hostPath"]["path"] for one in pod["volumes"]}
    mounts = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
    shared = ("plugins", "plugins_registry", "pod-resources")
    assert {path for path, on_node in mounts.items() if path == on_node} == {
        *(f"{root}/{name}" for name in shared),
        *("/var/lib/kubelet/device-plugins", "/var/run/cdi", "/run/lock"),
    }
    classes = {
        one["metadata"]["name"]: one["spec"]["selectors"] for one in made if one["kind"] == "DeviceClass"
    }
    assert [*classes] == ["gpu.imagematrix.io", "mig.imagematrix.io"]


def test_the_classes_of_devices_admit_gpus_and_mig_devices(tls, hosts):
    made = [one for one in make_manifests(full(dra=True), tls) if one["kind"] == "DeviceClass"]
    expressions = [one["spec"]["selectors"][0]["cel"]["expression"] for one in made]
    cel = Cel()
    admitted = [
        [bool(cel(expression, device=json_to_cel(seen(device)))) for expression in expressions]
        for device in slices.make_devices(hosts["mig"], {})
    ]
    assert admitted == [[True, False], *[[False, True]] * 3]


def seen(device):
    """Return a device as CEL sees it, with the attributes that are texts."""
    texts = {name: one["string"] for name, one in device["attributes"].items() if "string" in one}
    return {"driver": slices.DRIVER, "attributes": {slices.DRIVER: texts}}


def test_a_node_gets_a_plugin_or_a_driver():
    with pytest.raises(UsageError, match="not by both"):
        full(dra=True, plugin=())


def test_the_webhook_may_read_nodes_and_with_events_what_these_need(tls):
    made = by_kind(full(), tls)
    reading = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]}
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
    events = {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]}
    assert made["ClusterRole"]["rules"] == [reading, pods, events]
    (lease,) = made["Role"]["rules"]
    assert (lease["resources"], lease["verbs"]) == (["leases"], ["get", "update"])
    assert lease["resourceNames"] == [made["Lease"]["metadata"]["name"]]
    assert made["Role"]["metadata"]["namespace"] == made["Lease"]["metadata"]["namespace"]
    (container,) = made["Deployment"]["spec"]["template"]["spec"]["containers"]
    option = container["args"].index("--events")
    assert container["args"][option + 1] == made["Lease"]["metadata"]["name"]
    without = by_kind(full(events=False), tls)
    assert without["ClusterRole"]["rules"] == [reading]
    assert "--events" not in without["Deployment"]["spec"]["template"]["spec"]["containers"][0]["args"]
    (subject,) = made["ClusterRoleBinding"]["subjects"]
    assert subject["name"] == made["ServiceAccount"]["metadata"]["name"]
    assert made["RoleBinding"]["subjects"] == [subject]
    assert made["Deployment"]["spec"]["template"]["spec"]["serviceAccountName"] == subject["name"]
    assert made["DaemonSet"]["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("events", [True, False])
def test_pods_about_which_the_webhook_is_not_asked_get_no_events(tls, events):
    manifests = by_kind(full(events=events, excluded=("system-x",)), tls)
    arguments = manifests["Deployment"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert ("--exclude system-x" in " ".join(arguments)) == events


@pytest.mark.parametrize("kind", ["Deployment", "DaemonSet"])
def test_containers_are_confined(tls, kind):
    spec = by_kind(full(), tls)[kind]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    writable = [one["name"] for one in container["volumeMounts"] if not one.get("readOnly")]
    assert writable == ([] if kind == "Deployment" else ["features"])
    assert spec["securityContext"].get("runAsNonRoot", False) is (kind == "Deployment")
    assert spec["imagePullSecrets"] == [{"name": "logins"}]


def test_service_budget_and_pods_belong_together(tls):
    made = by_kind(full(), tls)
    labels = made["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert made["Service"]["spec"]["selector"] == labels
    assert made["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert made["Deployment"]["spec"]["replicas"] > made["PodDisruptionBudget"]["spec"]["minAvailable"]
    (container,) = made["Deployment"]["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert [port["targetPort"] for port in made["Service"]["spec"]["ports"]] == [ports["https"]]
    # What asks for the health has a port of its own, which the service does not have.
    words = dict(pairwise(container["args"]))
    assert words["--listen"] == f"0.0.0.0:{ports['https']}"
    assert words["--health"] == f"0.0.0.0:{ports['health']}"
    asked = {probe: container[probe]["httpGet"] for probe in ("livenessProbe", "readinessProbe")}
    assert asked == {
        "livenessProbe": {"path": "/healthz", "port": "health"},
        "readinessProbe": {"path": "/readyz", "port": "health"},
    }


def test_the_configuration_fails_open_or_closed(tls):
    for deny, policy in ((True, "Fail"), (False, "Ignore")):
        installation = full(deny=deny, excluded=("system-x",), timeout_s=7)
        (hook,) = by_kind(installation, tls)["MutatingWebhookConfiguration"]["webhooks"]
        assert (hook["failurePolicy"], hook["timeoutSeconds"]) == (policy, 7)
        (selector,) = hook["namespaceSelector"]["matchExpressions"]
        space = by_kind(installation, tls)["Namespace"]["metadata"]
        assert space["labels"][selector["key"]] == space["name"]
        assert selector["values"] == ["kube-system", "imagematrix", "system-x"]
        assert hook["clientConfig"]["service"]["path"] == PATH
        assert base64.b64decode(hook["clientConfig"]["caBundle"]) == tls.authorities
        expressions = [make_use_condition(AdmissionPolicy(name=name, classes=())) for name in (NAME, SECOND)]
        assert hook["matchConditions"][0]["expression"] == " || ".join(expressions)
    (hook,) = by_kind(full(conditions=False), tls)["MutatingWebhookConfiguration"]["webhooks"]
    assert "matchConditions" not in hook


def test_the_certificate_is_trusted_by_the_name_of_the_service(tls, tmp_path):
    (tmp_path / "crt").write_bytes(tls.chain)
    (tmp_path / "key").write_bytes(tls.key)
    context = Certificate(tmp_path / "crt", tmp_path / "key").context

    async def connect(name):
        runner = web.AppRunner(web.Application())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        trusting = ssl.create_default_context(cadata=tls.authorities.decode())
        trusting.verify_flags |= ssl.VERIFY_X509_STRICT
        try:
            port = runner.addresses[0][1]
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, server_hostname=name)
            writer.close()
            await writer.wait_closed()
        finally:
            await runner.cleanup()

    for name in make_service_names("imagematrix"):
        asyncio.run(connect(name))
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        asyncio.run(connect("other.imagematrix.svc"))


def test_certificates_from_files(tls, tmp_path):
    chain, key, ca = (tmp_path / name for name in ("crt", "key", "ca"))
    chain.write_bytes(tls.chain)
    key.write_bytes(tls.key)
    ca.write_bytes(tls.authorities)
    name = make_service_names("imagematrix")[0]
    assert certificates.load_certificate(chain, key, ca, name) == tls
    with pytest.raises(UsageError, match=r"is not for x\.y\.svc"):
        certificates.load_certificate(chain, key, ca, "x.y.svc")
    key.write_bytes(certificates.make_certificate(["x"]).key)
    with pytest.raises(UsageError, match="is not the key of"):
        certificates.load_certificate(chain, key, ca, name)
    key.write_bytes(b"x")
    with pytest.raises(UsageError, match="invalid certificate or key"):
        certificates.load_certificate(chain, key, ca, name)
    key.unlink()
    with pytest.raises(UsageError, match="No such file"):
        certificates.load_certificate(chain, key, ca, name)


def imagematrix(*words):
    command = [sys.executable, "-m", "imagematrix", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_webhook_accepts_the_options_in_the_manifests(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    words = ["--program", PROGRAM, "--where", "compute=9.0", "--allow-cpu", "--on-unknown", "deny"]
    done = imagematrix("kubernetes", "render", "install", NAME, *words, "--", SECOND)
    assert (done.returncode, done.stderr) == (0, "")
    made = list(yaml.safe_load_all(done.stdout))
    assert [one["kind"] for one in made] == KINDS
    (container,) = made[KINDS.index("Deployment")]["spec"]["template"]["spec"]["containers"]
    arguments = container["args"]
    assert arguments[:6] == ["kubernetes", "webhook", "--catalog", NAME, "--catalog", SECOND]
    assert arguments[-7:-5] == ["--on-unknown", "deny"]
    assert arguments[-5:-3] == ["--events", "imagematrix-webhook"]
    assert arguments[-3:] == ["--where", "compute=9.0", "--allow-cpu"]
    started = imagematrix(*arguments)
    assert started.returncode == 2
    assert "not running in a pod" in started.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([NAME], "Missing option '--program'"),
        (["t:v1", "--program", PROGRAM], "t:v1 is not in a registry"),
        ([f"{NAME}@sha256:{'a' * 64}", "--program", PROGRAM], "a version, not a digest"),
        ([NAME, "--program", PROGRAM, "--namespace", "A"], "invalid namespace 'A'"),
        ([NAME, "--program", PROGRAM, "--on-unknown", "x"], "invalid --on-unknown"),
        ([NAME, "--program", PROGRAM, "--where", "python"], "invalid condition 'python'"),
        ([NAME, "--program", PROGRAM, "--by", "product"], "--by is for --device-plugin"),
        ([NAME, "--program", PROGRAM, "--kubelet", "/data"], "--kubelet is for --device-plugin"),
        ([NAME, "--program", PROGRAM, "--device-plugin", "--kubelet", "x"], "invalid --kubelet: 'x'"),
        ([NAME, "--program", PROGRAM, "--device-plugin", "--by", "x"], "invalid --by"),
        ([NAME, "--program", PROGRAM, "--tls", "x", "y", "z"], "x: No such file"),
    ],
)
def test_invalid_options_are_rejected(cli, words, expected):
    cli("kubernetes", "render", "install", *words).refuses(2, expected)


def test_the_command_of_the_daemonset_writes_the_labels_of_a_node(tmp_path):
    (tmp_path / "host" / "proc").mkdir(parents=True)
    (tmp_path / "host" / "proc" / "cpuinfo").write_bytes(Path("/proc/cpuinfo").read_bytes())
    (tmp_path / "features").mkdir()
    once = LABELLING.removeprefix("while :; do").partition("; sleep")[0]
    once = once.replace("/host", f"{tmp_path}/host").replace("/features", f"{tmp_path}/features")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["sh", "-c", once], check=True, env={**os.environ, "PATH": path}, capture_output=True)
    (written,) = (tmp_path / "features").iterdir()
    assert written.name == "imagematrix"
    assert "\nimagematrix.io/class=" in written.read_text()
