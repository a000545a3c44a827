"""The device plugin and a real kubelet: a pod gets its allocated GPUs, and nothing else."""

import re

import pytest
from pod_devices import CONTROL, MAKE, N1, counted, seen

GPU, H200, VRAM = (f"imagematrix.io/{name}" for name in ("gpu", "gpu-h200", "vram-gib"))


@pytest.fixture(scope="module", autouse=True)
def _plugins(cluster):
    """A plugin on each node, started as by systemd."""
    for node in cluster.nodes:
        node.start_plugin("--by", "product", "--vram")
    cluster.wait(lambda: healthy(cluster, GPU, "n2") == 2)
    yield
    for node in cluster.nodes:
        node.stop("plugin")


@pytest.fixture(autouse=True)
def _all_is_free_before_a_test(cluster):
    cluster.wait(lambda: [healthy(cluster, one) for one in (GPU, H200, VRAM)] == [2, 2, 280])


def healthy(cluster, resource, node="n1"):
    """Return how many working devices a node has, including those in use under this name."""
    return int(cluster.get("node", node)["status"]["allocatable"].get(resource, 0))


def gpus(report):
    """Return the UUIDs in a pod's environment."""
    return re.findall("^IMAGEMATRIX_GPUS=(.*)$", report, re.MULTILINE)


def test_each_pod_sees_its_gpu_and_the_surplus_waits(cluster, create, training):
    names = {"a", "b", "c"}
    for name in sorted(names):
        create(name, training.name, {GPU: "1"}, nodeSelector=N1)
    cluster.wait(lambda: sorted(cluster.phases(*names)) == ["Pending", "Running", "Running"])
    first, second = (name for name in sorted(names) if cluster.phases(name) == ["Running"])
    (waiting,) = names - {first, second}
    unseen = {gpu["uuid"]: f"nvidia{gpu['minor']}" for gpu in cluster.nodes[0].probed()["gpus"]}
    given = {}
    for name in (first, second):
        report = cluster.whole_report(name)
        (uuid,) = gpus(report)
        given[name] = unseen.pop(uuid)
        assert seen(report) == ({given[name]}, CONTROL)
        mounts = cluster.get("pod", name)["spec"]["containers"][0]["volumeMounts"]
        assert [one["mountPath"] for one in mounts] == ["/var/run/secrets/kubernetes.io/serviceaccount"]
    assert not unseen
    for device, opened in ((given[first], True), (given[second], False)):
        number = cluster.nodes[0].number(f"/dev/{device}")
        done = cluster.kubectl("exec", first, "--", "sh", "-c", MAKE.format(device, number), check=False)
        assert ("Operation not permitted" not in done.stderr) == (done.returncode == 0) == opened
    assert f"Insufficient {GPU}" in cluster.kubectl("describe", "pod", waiting).stdout
    cluster.wait(lambda: healthy(cluster, H200) == 0)
    resources, pending = counted(cluster)
    assert resources == {GPU: [2, 2, 2, 0], H200: [2, 0, 0, 0], VRAM: [280, 0, 0, 0]}
    assert pending == [{"resource": GPU, "pods": 1, "requested": 1}]
    cluster.kubectl("delete", "pod", first)
    cluster.wait(lambda: cluster.phases(waiting) == ["Running"])
    assert seen(cluster.whole_report(waiting)) == ({given[first]}, CONTROL)


def test_a_gpu_does_not_count_under_two_names(cluster, create, training):
    create("by-product", training.name, {H200: "1"}, nodeSelector=N1)
    cluster.wait(lambda: cluster.phases("by-product") == ["Running"])
    cluster.wait(lambda: [healthy(cluster, GPU), healthy(cluster, VRAM)] == [1, 140])
    create("two", training.name, {GPU: "2"}, nodeSelector=N1)
    create("one", training.name, {GPU: "1"}, nodeSelector=N1)
    cluster.wait(lambda: cluster.phases("one") == ["Running"])
    assert cluster.phases("two") == ["Pending"]
    (mine,), (other,) = (gpus(cluster.whole_report(name)) for name in ("one", "by-product"))
    assert mine != other


def test_the_gpu_of_a_finished_pod_is_free(cluster, create, training):
    create("short", training.name, {GPU: "2"}, arguments=["8"], nodeSelector=N1)
    cluster.wait(lambda: cluster.phases("short") == ["Succeeded"])
    create("next", training.name, {H200: "2"}, arguments=["8"], nodeSelector=N1)
    cluster.wait(lambda: cluster.phases("next") == ["Succeeded"])
    assert counted(cluster)[0][GPU][2] == 0


def test_shares_are_packed_and_do_not_span_gpus(cluster, create, training):
    for name, gib in (("s1", "100"), ("s2", "20"), ("s3", "100")):
        create(name, training.name, {VRAM: gib}, nodeSelector=N1)
        cluster.wait(lambda name=name: cluster.phases(name) == ["Running"])
    first, second, third = (gpus(cluster.whole_report(name)) for name in ("s1", "s2", "s3"))
    assert first == second != third
    assert "IMAGEMATRIX_VRAM_MIB=20480\n" in cluster.whole_report("s2")
    cluster.wait(lambda: healthy(cluster, GPU) == 0)
    create("s4", training.name, {VRAM: "50"}, nodeSelector=N1)  # of the 60 that are left, on two GPUs
    cluster.wait(lambda: cluster.phases("s4") == ["Failed"])
    status = cluster.get("pod", "s4")["status"]
    assert status["reason"] == "UnexpectedAdmissionError"
    assert "50 GiB would span 2 GPUs" in status["message"]


def test_a_restarted_kubelet_gets_the_plugin_back(cluster, create, training):
    node = cluster.nodes[0]
    create("before", training.name, {GPU: "1"}, nodeSelector=N1)
    cluster.wait(lambda: cluster.phases("before") == ["Running"])
    registered = node.log("plugin").count(f"offering 2 {GPU}\n")
    node.restart_kubelet()
    cluster.wait(lambda: node.log("plugin").count(f"offering 2 {GPU}\n") == registered + 1)
    create("after", training.name, {GPU: "1"}, nodeSelector=N1)
    cluster.wait(lambda: cluster.phases("before", "after") == ["Running", "Running"])
    assert gpus(cluster.whole_report("before")) != gpus(cluster.whole_report("after"))
    cluster.wait(lambda: healthy(cluster, H200) == 0)


def test_a_restarted_plugin_knows_what_is_held(cluster, create, training):
    node = cluster.nodes[0]
    create("held", training.name, {GPU: "1"}, nodeSelector=N1)
    cluster.wait(lambda: cluster.phases("held") == ["Running"])
    node.stop("plugin")
    cluster.wait(lambda: healthy(cluster, GPU) == 0)
    assert cluster.phases("held") == ["Running"]
    node.start_plugin("--by", "product", "--vram")
    cluster.wait(lambda: [healthy(cluster, GPU), healthy(cluster, H200)] == [2, 1])


def test_a_gpu_without_its_device_node_is_not_allocated(cluster):
    node = cluster.nodes[0]
    number = node.number("/dev/nvidia1").split()
    node.run("rm", "/dev/nvidia1")
    cluster.wait(lambda: [healthy(cluster, GPU), healthy(cluster, VRAM)] == [1, 140])
    node.run("mknod", "-m", "666", "/dev/nvidia1", "c", *number)
