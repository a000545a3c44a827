"""The GPUs of DRA drivers, counted from ResourceSlices and ResourceClaims."""

import json

import pytest

from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.dra.slices import DRIVER, make_devices, make_slice, split_devices
from imagematrix.integrations.kubernetes.nodes.gpu_counts import count_gpus

NVIDIA = "gpu.nvidia.com"


def node(name, **spec):
    return {"kind": "Node", "metadata": {"name": name}, "spec": spec}


def published(name, *listed, driver=NVIDIA, generation=1, pool=None):
    spec = {"driver": driver, "nodeName": name, "pool": {"name": pool or name, "generation": generation}}
    return {"kind": "ResourceSlice", "spec": {**spec, "devices": list(listed)}}


def device(name, **fields):
    return {"name": name, **fields}


def claim(name, *results, driver=NVIDIA, pool="n1", asks=None):
    allocated = [{"driver": driver, "pool": pool, "device": one} for one in results]
    status = {"status": {"allocation": {"devices": {"results": allocated}}}} if results else {}
    requests = asks or [{"name": "gpu", "exactly": {"deviceClassName": driver, "count": 1}}]
    spec = {"devices": {"requests": requests}}
    return {"kind": "ResourceClaim", "metadata": {"namespace": "ml", "name": name}, "spec": spec, **status}


def pod(*names, made=(), node_name=None, phase="Pending"):
    """Return a pod with claims by name, and claims that were made for it from templates."""
    by_name = [{"name": name, "resourceClaimName": name} for name in names]
    templates = [{"name": name, "resourceClaimTemplateName": "one"} for name in made]
    return {
        "kind": "Pod",
        "metadata": {"namespace": "ml", "name": "p"},
        "spec": {
            "containers": [],
            "resourceClaims": by_name + templates,
            **({"nodeName": node_name} if node_name else {}),
        },
        "status": {
            "phase": phase,
            "resourceClaimStatuses": [{"name": name, "resourceClaimName": f"p-{name}"} for name in made],
        },
    }


def count(*objects):
    return count_gpus([({"kind": "List", "items": list(objects)}, "all.json")])


def of_node(cluster, position=0):
    return {
        one.resource: (one.capacity, one.allocatable, one.requested, one.free)
        for one in cluster.nodes[position].counts
    }


def ours(host, name):
    """Return the slices that our driver publishes for a host."""
    groups = split_devices(make_devices(host, {}))
    return [
        {**make_slice(name, None, index, count=len(groups), generation=1, devices=group)}
        for index, group in enumerate(groups)
    ]


def test_gpus_of_our_driver_are_free_unless_claims_have_them(hosts):
    slices = ours(hosts["genoa-h200"], "n1")
    names = [one["name"] for one in slices[0]["spec"]["devices"]]

    usage = count(
        node("n1"),
        node("n2", unschedulable=True),
        *slices,
        *ours(hosts["milan-a10"], "n2"),
        claim("two", *names[:2], driver=DRIVER),
        claim("shared", names[2], driver=DRIVER),
        pod("shared", node_name="n1", phase="Running"),
        pod("shared", node_name="n1", phase="Running"),
    )

    total = len(hosts["milan-a10"].gpus)
    assert of_node(usage) == {DRIVER: (8, 8, 3, 5)}
    assert of_node(usage, 1) == {DRIVER: (total, total, 0, 0)}


def test_a_claim_keeps_a_gpu_that_is_no_longer_published():
    slices = published("n1", device("gpu-0"), device("gpu-1"))

    usage = count(node("n1"), slices, claim("a", "gpu-0"), claim("b", "gone"), pod())

    assert of_node(usage) == {NVIDIA: (3, 2, 2, 1)}
    unpublished = count(node("n1"), claim("b", "gone"), pod())
    assert of_node(unpublished) == {NVIDIA: (1, 0, 1, 0)}


def test_only_the_newest_generation_of_a_pool_counts():
    old, new = device("gpu-0"), device("gpu-1")

    usage = count(node("n1"), published("n1", old), published("n1", new, generation=2), pod())

    assert of_node(usage) == {NVIDIA: (1, 1, 0, 1)}


def test_partitions_of_one_gpu_count_as_one_gpu():
    parts = [device(name, consumesCounters=[{"counterSet": "gpu-0"}]) for name in ("gpu-0", "mig-a", "mig-b")]
    slices = published("n1", *parts, device("gpu-1"))

    assert of_node(count(node("n1"), slices, pod())) == {NVIDIA: (2, 2, 0, 2)}
    for claimed in (["mig-a"], ["mig-a", "mig-b"], ["gpu-0"]):
        assert of_node(count(node("n1"), slices, claim("a", *claimed), pod())) == {NVIDIA: (2, 2, 1, 1)}


def test_tainted_devices_are_not_free_and_administrators_take_none():
    taints = [{"key": "broken", "effect": effect} for effect in ("None", "NoSchedule")]
    slices = published("n1", device("gpu-0", taints=taints), device("gpu-1", taints=taints[:1]))
    looking = claim("admin", "gpu-1")
    looking["status"]["allocation"]["devices"]["results"][0]["adminAccess"] = True

    assert of_node(count(node("n1"), slices, looking, pod())) == {NVIDIA: (2, 1, 0, 1)}


def test_other_devices_and_pools_without_a_node_do_not_count():
    elsewhere = published("n1", device("gpu-7"), pool="all")
    del elsewhere["spec"]["nodeName"]
    each = device("gpu-8", nodeName="n1")
    by_device = published("n1", each, pool="per-device")
    del by_device["spec"]["nodeName"]
    nic = published("n1", device("nic-0"), driver="dra.net")

    usage = count(
        node("n1"), elsewhere, by_device, nic, claim("nic", "nic-0", driver="dra.net", pool="n1"), pod()
    )

    assert of_node(usage) == {NVIDIA: (1, 1, 0, 1)}


def test_claims_of_pods_without_a_node_are_pending():
    two = [{"name": "gpu", "exactly": {"deviceClassName": "mig.nvidia.com", "count": 2}}]
    either = [
        {
            "name": "gpu",
            "firstAvailable": [
                {"name": "all", "deviceClassName": NVIDIA, "allocationMode": "All"},
                {"name": "part", "deviceClassName": "mig.nvidia.com"},
            ],
        },
        {"name": "nic", "exactly": {"deviceClassName": "nic.example.com", "count": 1}},
    ]

    usage = count(
        node("n1"),
        published("n1", device("gpu-0")),
        *(claim("shared", asks=two), claim("p-own", asks=either), claim("unused"), claim("had", "gpu-0")),
        *(pod("shared"), pod("shared", "had", made=["own"]), pod("had")),
        pod("unused", phase="Failed"),
    )

    assert [(one.resource, one.pods, one.requested) for one in usage.pending] == [
        (NVIDIA, 1, 1),
        ("mig.nvidia.com", 2, 2),
    ]


def test_claims_must_be_in_the_lists_if_pods_have_some():
    slices = published("n1", device("gpu-0"))

    with pytest.raises(UsageError, match=r"all\.json: pods have claims, but no claims found") as caught:
        count(node("n1"), slices, pod(made=["a"], node_name="n1"))

    assert "resourceslices,resourceclaims" in caught.value.remedy
    assert of_node(count(node("n1"), pod("a", node_name="n1"))) == {}
    for other in (pod("missing"), pod("a", node_name="n1", phase="Succeeded")):
        assert of_node(count(node("n1"), slices, other)) == {NVIDIA: (1, 1, 0, 1)}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"kind": "ResourceSlice"}, r"items\[2\]: spec: has no pool"),
        ({"kind": "ResourceClaim"}, r"items\[2\]: metadata: is missing"),
        (
            {"kind": "ResourceSlice", "spec": {"driver": NVIDIA, "pool": {"name": "n1"}}},
            "generation is missing",
        ),
    ],
)
def test_invalid_objects_are_refused(broken, message):
    with pytest.raises(UsageError, match=message):
        count(node("n1"), pod(), broken)


def test_the_command_counts_lists_of_an_api_server(cli, tmp_path, conforms):
    """The items in the output of `kubectl get --raw` have no kinds."""
    slices = {"kind": "ResourceSliceList", "items": [published("n1", device("gpu-0"), device("gpu-1"))]}
    claims = {"kind": "ResourceClaimList", "items": [claim("a", "gpu-0"), claim("b")]}
    for items in (slices["items"], claims["items"]):
        for item in items:
            del item["kind"]
    placed = pod("a", node_name="n1", phase="Running")
    nodes, pods = tmp_path / "nodes.json", tmp_path / "pods.json"
    nodes.write_text(json.dumps({"kind": "List", "items": [node("n1"), pod("b"), placed]}))
    pods.write_text(json.dumps(slices))

    cli("kubernetes", "gpus", "--nodes", nodes, "--pods", pods).fails(
        2, "pods have claims, but no claims found"
    )

    pods.write_text(json.dumps(claims))
    document = json.loads(cli("kubernetes", "gpus", "--nodes", nodes, "--pods", pods, "--json").out)
    assert conforms(document)["pending"] == [{"resource": NVIDIA, "pods": 1, "requested": 1}]
    (counted,) = document["nodes"][0]["resources"]
    assert counted == {"resource": NVIDIA, "capacity": 1, "allocatable": 0, "requested": 1, "free": 0}
