"""Our DRA driver with a real scheduler, kubelet and containerd: a pod gets the GPU of its claim, no other."""

import json
from typing import Any

import pytest
import yaml
from engines import ROOT
from pod_devices import CONTROL, MAKE, N1, counted, seen

from imagematrix.integrations.kubernetes.dra.slices import DRIVER
from imagematrix.integrations.kubernetes.install.install import DRA

pytestmark = pytest.mark.since("1.34")
NVIDIA = "gpu.nvidia.com"
CDI = "/var/run/cdi"
# Holds a lease of the first GPU, as `run` does.
LEASE = """
import time
from imagematrix.launcher.gpu_claims.gpu_claim import ClaimRequest, claim_gpus
from imagematrix.hardware.gpu_request.choice import Choice
from imagematrix.hardware.host.probe import probe
with claim_gpus(ClaimRequest(choices=[Choice(gpus=probe().gpus[:1], count=1)]), lambda _: {}):
    print("leased", flush=True)
    time.sleep(600)
"""


def start_driver(cluster, node):
    """Start the driver as systemd would, with what the kubelet may do."""
    known = json.loads(cluster.control.configuration(f"system:node:{node.name}").read_text())
    (node.folder / "token").write_text(known["users"][0]["user"].pop("token"))
    known["users"][0]["user"]["tokenFile"] = "token"
    config = node.folder / "driver.kubeconfig"
    config.write_text(json.dumps(known))
    words = ("kubernetes", "dra-driver", "--node-name", node.name, "--kubeconfig", config)
    node.start("dra", ROOT / ".venv/bin/imagematrix", *words)


@pytest.fixture(scope="module", autouse=True)
def _drivers(cluster, training):
    """A driver on each node, and the classes of devices that `render install` writes."""
    words = ("kubernetes", "render", "install", training.name, "--program", "reg/p:1", "--dra-driver")
    made = yaml.safe_load_all(cluster.imagematrix(*words).stdout)
    classes = [one for one in made if one["kind"] == "DeviceClass"]
    cluster.apply(*classes)
    for node in cluster.nodes:
        start_driver(cluster, node)
    cluster.wait(lambda: [published(cluster, node) for node in ("n1", "n2")] == [2, 2])
    yield
    for node in cluster.nodes:
        node.stop("dra")
    cluster.kubectl("delete", "resourceslices", "--all")
    cluster.kubectl("delete", "deviceclass", *(one["metadata"]["name"] for one in classes))


@pytest.fixture(autouse=True)
def _all_is_free_before_a_test(cluster):
    cluster.wait(lambda: not any(specs(node) for node in cluster.nodes) and published(cluster, "n1") == 2)


@pytest.fixture
def claims(cluster):
    """Return a function that makes a ResourceClaim or a template for a GPU, removed after the test."""
    made = []

    def make(kind, name, *expressions, device_class="gpu.imagematrix.io", count=1):
        selectors = [{"cel": {"expression": one}} for one in expressions]
        exactly = {"deviceClassName": device_class, "count": count, "selectors": selectors}
        spec = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
        one = {"apiVersion": "resource.k8s.io/v1", "kind": kind, "metadata": {"name": name}}
        cluster.apply(one | {"spec": spec if kind == "ResourceClaim" else {"spec": spec}})
        made.append(f"{kind}/{name}")
        return {f"{kind[0].lower()}{kind[1:]}Name": name}

    yield make
    if made:
        cluster.kubectl("delete", "pods", "--all", "--wait")
        cluster.kubectl("delete", *made)


def devices(cluster, node, driver=DRIVER):
    """Return the published devices of a node."""
    slices = cluster.get("resourceslices")["items"]
    mine = [one["spec"] for one in slices if one["spec"]["driver"] == driver]
    return [device for one in mine if one["nodeName"] == node for device in one.get("devices", ())]


def published(cluster, node):
    return len(devices(cluster, node))


def specs(node):
    """Return the names of the CDI specs on a node."""
    return node.run("sh", "-c", f"ls -A {CDI} 2>/dev/null || true").stdout.split()


def holders(node):
    """Return what has each GPU, as `gpus` on the node shows it."""
    told = json.loads(node.imagematrix("gpus", "--json").stdout)["gpus"]
    return {f"nvidia{gpu['minor']}": {user["name"] for user in gpu["used_by"]} for gpu in told}


def running(cluster, *names):
    cluster.wait(lambda: cluster.phases(*names) == ["Running"] * len(names))


def given(cluster, pod):
    """Return the device node of the GPU that a pod can open; it has no other."""
    (gpu,), control = seen(cluster.whole_report(pod))
    assert control == CONTROL
    return gpu


def test_slices_show_each_gpu(cluster):
    for node in cluster.nodes:
        host = node.probed()
        for device, gpu in zip(devices(cluster, node.name), host["gpus"], strict=True):
            facts = {name: next(iter(one.values())) for name, one in device["attributes"].items()}
            assert [facts["uuid"], facts["minor"]] == [gpu["uuid"], gpu["minor"]]
            assert [facts["driver"], facts["productName"]] == [host["driver"]["version"], gpu["name"]]
    (owner,) = cluster.get("resourceslices")["items"][0]["metadata"]["ownerReferences"]
    assert owner["kind"] == "Node"


def test_each_pod_gets_the_gpu_of_its_claim_and_the_surplus_waits(cluster, create, training, claims):
    template = claims("ResourceClaimTemplate", "one")
    names = {"a", "b", "c"}
    for name in sorted(names):
        create(name, training.name, claim=template, nodeSelector=N1)
    cluster.wait(lambda: sorted(cluster.phases(*names)) == ["Pending", "Running", "Running"])
    first, second = (name for name in sorted(names) if cluster.phases(name) == ["Running"])
    (waiting,) = names - {first, second}
    node = cluster.nodes[0]
    mine, other = given(cluster, first), given(cluster, second)
    assert {mine, other} == {f"nvidia{gpu['minor']}" for gpu in node.probed()["gpus"]}
    pod = cluster.get("pod", first)["spec"]["containers"][0]
    assert [one["mountPath"] for one in pod["volumeMounts"]] == [
        "/var/run/secrets/kubernetes.io/serviceaccount"
    ]
    assert "IMAGEMATRIX" not in cluster.whole_report(first)
    for device, opened in ((mine, True), (other, False)):
        number = node.number(f"/dev/{device}")
        done = cluster.kubectl("exec", first, "--", "sh", "-c", MAKE.format(device, number), check=False)
        assert ("Operation not permitted" not in done.stderr) == (done.returncode == 0) == opened
    cluster.wait(lambda: "cannot allocate all claims" in cluster.kubectl("describe", "pod", waiting).stdout)
    names_of_claims = {user.partition("/")[0] for users in holders(node).values() for user in users}
    assert names_of_claims == {"default"}
    assert len(specs(node)) == 2
    resources, pending = counted(cluster, "nodes,pods,resourceslices,resourceclaims")
    assert resources[DRIVER] == [2, 2, 2, 0]
    assert pending == [{"resource": DRIVER, "pods": 1, "requested": 1}]
    cluster.kubectl("delete", "pod", first)
    running(cluster, waiting)
    assert given(cluster, waiting) == mine
    assert len(specs(node)) == 2


def test_pods_that_name_one_claim_share_its_gpu(cluster, create, training, claims):
    claim = claims("ResourceClaim", "shared", f'device.attributes["{DRIVER}"].productName == "NVIDIA H200"')
    for name in ("s1", "s2"):
        create(name, training.name, claim=claim)
    running(cluster, "s1", "s2")
    assert given(cluster, "s1") == given(cluster, "s2")
    assert counted(cluster, "nodes,pods,resourceslices,resourceclaims")[0][DRIVER] == [2, 2, 1, 1]
    node = cluster.nodes[0]
    assert holders(node)[given(cluster, "s1")] == {"default/shared (claim)"}
    cluster.kubectl("delete", "pod", "s1")
    assert len(specs(node)) == 1
    cluster.kubectl("delete", "pod", "s2")
    cluster.wait(lambda: specs(node) == [])
    assert holders(node) == {"nvidia0": set(), "nvidia1": set()}


def test_a_restarted_driver_and_a_restarted_kubelet_neither_lose_nor_double_a_claim(
    cluster, create, training, claims
):
    template = claims("ResourceClaimTemplate", "one")
    node = cluster.nodes[0]
    create("before", training.name, claim=template, nodeSelector=N1)
    running(cluster, "before")
    (spec,) = specs(node)
    node.stop("dra")
    create("between", training.name, claim=template, nodeSelector=N1)
    cluster.wait(lambda: cluster.get("pod", "between")["spec"].get("nodeName") == "n1")
    assert cluster.phases("before", "between") == ["Running", "Pending"]
    start_driver(cluster, node)
    running(cluster, "before", "between")
    assert given(cluster, "before") != given(cluster, "between")
    assert spec in specs(node)
    node.restart_kubelet()
    cluster.wait(lambda: node.log("dra").count("registered\n") >= 3)
    cluster.wait(lambda: published(cluster, "n1") == 2)
    running(cluster, "before", "between")
    create("third", training.name, claim=template, nodeSelector=N1)
    cluster.wait(lambda: "cannot allocate all claims" in cluster.kubectl("describe", "pod", "third").stdout)
    node.stop("dra")
    cluster.kubectl("delete", "pod", "before", "--wait=false")
    start_driver(cluster, node)
    running(cluster, "third")
    assert spec not in specs(node)
    assert len(specs(node)) == 2


def test_a_gpu_that_a_launch_outside_of_pods_has_is_not_given(cluster, create, training, claims):
    template = claims("ResourceClaimTemplate", "one")
    node = cluster.nodes[0]
    node.start("user", ROOT / ".venv/bin/python", "-c", LEASE)
    cluster.wait(lambda: published(cluster, "n1") == 1)
    for name in ("a", "b"):
        create(name, training.name, claim=template, nodeSelector=N1)
    cluster.wait(lambda: sorted(cluster.phases("a", "b")) == ["Pending", "Running"])
    (first,) = (name for name in ("a", "b") if cluster.phases(name) == ["Running"])
    assert given(cluster, first) == "nvidia1"
    node.stop("user")
    running(cluster, "a", "b")


def test_a_gpu_that_is_taken_before_kubelet_prepares_it_is_refused_until_it_is_free(
    cluster, create, training, claims
):
    template = claims("ResourceClaimTemplate", "both", count=2)
    node = cluster.nodes[0]
    node.stop("dra")
    create("late", training.name, claim=template, nodeSelector=N1)
    cluster.wait(lambda: cluster.get("pod", "late")["spec"].get("nodeName") == "n1")
    node.start("user", ROOT / ".venv/bin/python", "-c", LEASE)
    cluster.wait(lambda: "leased" in node.log("user"))
    start_driver(cluster, node)
    cluster.wait(lambda: "is in use by" in cluster.kubectl("describe", "pod", "late").stdout)
    assert specs(node) == []
    node.stop("user")
    running(cluster, "late")
    assert seen(cluster.whole_report("late")) == ({"nvidia0", "nvidia1"}, CONTROL)


def test_neither_driver_nor_plugin_starts_beside_the_other(cluster):
    node = cluster.nodes[0]
    done = node.imagematrix("kubernetes", "device-plugin")
    assert done.returncode == 2
    assert "the DRA driver offers this node's GPUs" in done.stderr


def needed(cluster, image, driver):
    """Return the device selector of each variant that has GPU code, by its digest."""
    words = ("kubernetes", "needs", image, "--dra-driver", driver, "--json")
    variants = json.loads(cluster.imagematrix(*words).stdout)["variants"]
    return {one["digest"]: one["device"] for one in variants if one["device"]}


def test_the_scheduler_places_variants_by_selectors_for_our_driver(cluster, create, training, claims):
    selectors = needed(cluster, training.name, DRIVER)
    for variant, node in (("sm_90 550.163.01", "n1"), ("sm_86 535.261.03", "n2"), ("sm_86 550.163.01", None)):
        digest = training.digests[variant]
        name = variant.replace("_", "").replace(" ", "-")
        template = claims("ResourceClaimTemplate", name, selectors[digest])
        create(name, f"{training.name.rpartition(':')[0]}@{digest}", claim=template)
        if node:
            running(cluster, name)
            assert cluster.get("pod", name)["spec"]["nodeName"] == node
            assert cluster.whole_report(name).startswith(f"{variant}\n")
        else:
            cluster.wait(
                lambda name=name: (
                    "cannot allocate all claims" in cluster.kubectl("describe", "pod", name).stdout
                )
            )


@pytest.fixture
def nvidia(cluster):
    """Slices as NVIDIA's DRA driver publishes them for both nodes, and its class of GPUs."""
    expression = f"device.driver == '{NVIDIA}' && device.attributes['{NVIDIA}'].type == 'gpu'"
    selecting = {"selectors": [{"cel": {"expression": expression}}]}
    made: list[dict[str, Any]] = [
        {"kind": "DeviceClass", "metadata": {"name": NVIDIA}, "spec": selecting},
    ]
    for node in cluster.nodes:
        host = node.probed()
        listed = [nvidia_device(gpu, host["driver"]["version"]) for gpu in host["gpus"]]
        pool = {"name": node.name, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": NVIDIA, "nodeName": node.name, "pool": pool, "devices": listed}
        made.append({"kind": "ResourceSlice", "metadata": {"name": f"{node.name}-{NVIDIA}"}, "spec": spec})
    cluster.apply(*({"apiVersion": "resource.k8s.io/v1", **one} for one in made))
    yield
    cluster.kubectl("delete", *(f"{one['kind']}/{one['metadata']['name']}" for one in made))


def nvidia_device(gpu, driver):
    """Return a device as in cmd/gpu-kubelet-plugin/deviceinfo.go of k8s-dra-driver-gpu."""
    semantic = ".".join(str(int(part)) for part in driver.split("."))
    return {
        "name": f"gpu-{gpu['minor']}",
        "attributes": {
            "type": {"string": "gpu"},
            "uuid": {"string": gpu["uuid"]},
            "productName": {"string": gpu["name"]},
            "brand": {"string": gpu["brand"].capitalize()},
            "cudaComputeCapability": {"version": f"{gpu['compute']}.0"},
            "driverVersion": {"version": semantic},
        },
        "capacity": {"memory": {"value": f"{gpu['memory_mib']}Mi"}},
    }


@pytest.mark.usefixtures("nvidia")
def test_the_scheduler_allocates_by_selectors_for_nvidias_driver(cluster, create, training, newer, claims):
    """There is no driver to prepare these claims, so the pods do not start."""
    for image, variant, node in (
        (training, "sm_90 550.163.01", "n1"),
        (training, "sm_86 535.261.03", "n2"),
        (training, "sm_86 550.163.01", None),
        (newer, "sm_90 580.65.06", None),
    ):
        digest = image.digests[variant]
        name = f"nvidia-{variant.replace('_', '').replace(' ', '-')}"
        selector = needed(cluster, image.name, NVIDIA)[digest]
        template = claims("ResourceClaimTemplate", name, selector, device_class=NVIDIA)
        create(name, f"{image.name.rpartition(':')[0]}@{digest}", claim=template)
        if node:
            cluster.wait(lambda name=name: cluster.get("pod", name)["spec"].get("nodeName"))
            assert cluster.get("pod", name)["spec"]["nodeName"] == node
        else:
            cluster.wait(
                lambda name=name: (
                    "cannot allocate all claims" in cluster.kubectl("describe", "pod", name).stdout
                )
            )


@pytest.fixture
def installed(cluster, training, program):
    """The driver as `render install` writes it, in place of those that systemd would start."""
    words = ("kubernetes", "render", "install", training.name, "--program", program, "--dra-driver")
    made = list(yaml.safe_load_all(cluster.imagematrix(*words).stdout))
    ours = [one for one in made if one["metadata"]["name"] == DRA]
    for node in cluster.nodes:
        node.stop("dra")
    cluster.apply(*(one for one in made if one["kind"] == "Namespace"), *ours)
    cluster.kubectl("rollout", "status", "-n", "imagematrix", f"daemonset/{DRA}", "--timeout=120s")
    yield
    cluster.kubectl("delete", "clusterrole,clusterrolebinding", DRA)
    cluster.uninstall()
    for node in cluster.nodes:
        start_driver(cluster, node)


@pytest.mark.usefixtures("installed")
def test_the_installed_driver_gives_gpus_and_may_do_nothing_else(cluster, create, training, claims):
    template = claims("ResourceClaimTemplate", "one")
    for name in ("a", "b"):
        create(name, training.name, claim=template, nodeSelector=N1)
    running(cluster, "a", "b")
    assert {given(cluster, "a"), given(cluster, "b")} == {"nvidia0", "nvidia1"}
    users = {user for users in holders(cluster.nodes[0]).values() for user in users}
    assert len(users) == 2
    assert all(user.endswith(" (claim)") for user in users)
    cluster.kubectl("delete", "pod", "a", "b")
    cluster.wait(lambda: specs(cluster.nodes[0]) == [])
    user = f"--as=system:serviceaccount:imagematrix:{DRA}"
    for verb, resource, allowed in (
        ("create", "resourceslices", "yes"),
        ("get", "resourceclaims", "yes"),
        ("get", "nodes", "yes"),
        ("list", "resourceclaims", "no"),
        ("update", "resourceclaims", "no"),
        ("list", "nodes", "no"),
        ("get", "pods", "no"),
        ("get", "secrets", "no"),
    ):
        done = cluster.kubectl("auth", "can-i", verb, resource, "-A", user, check=False)
        assert done.stdout.strip() == allowed, (verb, resource)
