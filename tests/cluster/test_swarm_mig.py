"""MIG devices on a node of a swarm, with the other image store: each task gets its own device."""

import pytest

REPORT = "ls /dev/nvidia[0-9]* /dev/nvidia-caps/*; env | grep ^IMAGEMATRIX_ | sort; echo end; sleep 600"


@pytest.fixture(scope="module")
def cluster(start_cluster):
    cluster = start_cluster()
    cluster.add("n1", "mig", 1, store="containerd").offer("--vram", "20G")
    cluster.form()
    return cluster


def reports(cluster, base, resource, replicas, running):
    """Start a service, and return what each of its tasks reports."""
    words = (
        "--no-resolve-image",
        "--replicas",
        replicas,
        "--generic-resource",
        resource,
        base,
        "sh",
        "-c",
        REPORT,
    )
    node = cluster.manager
    node.docker("service", "create", "-d", "--name", "parts", *words)
    expected = sorted(["running"] * running + ["pending"] * (int(replicas) - running))
    cluster.wait(lambda: cluster.states("parts") == expected)
    reported: list[list[str]] = []

    def ready():
        logs = [node.docker("logs", one).stdout for one in node.docker("ps", "-q").stdout.split()]
        reported[:] = [log.split()[:-1] for log in logs if log.endswith("end\n")]
        return len(reported) == running

    cluster.wait(ready)
    return reported


def test_each_task_has_its_own_device(cluster, base):
    (gpu,) = cluster.manager.gpus()
    reported = reports(cluster, base, "NVIDIA-GPU=1", "4", 3)
    by_uuid = {lines[-1]: lines[:-1] for lines in reported}
    assert set(by_uuid) == {f"IMAGEMATRIX_GPUS={device['uuid']}" for device in gpu["mig"]}
    for device in gpu["mig"]:
        nodes = [f"/dev/nvidia-caps/nvidia-cap{number}" for number in device["capabilities"]]
        assert by_uuid[f"IMAGEMATRIX_GPUS={device['uuid']}"] == [*nodes, "/dev/nvidia0"]
    (gpu,) = cluster.manager.gpus()
    assert [[one["name"].split(".")[0] for one in device["used_by"]] for device in gpu["mig"]] == [
        ["parts"]
    ] * 3
    cluster.manager.docker("service", "rm", "parts")
    cluster.wait(lambda: not any(device["used_by"] for device in cluster.manager.gpus()[0]["mig"]))


def test_a_share_is_on_one_device(cluster, base):
    """Two shares of 20 GB fit on the device of 40 GB, and none on the devices of 10 GB."""
    reported = reports(cluster, base, "VRAM-20G=1", "3", 2)
    (gpu,) = cluster.manager.gpus()
    large = next(device for device in gpu["mig"] if device["memory_mib"] > 20000)
    for lines in reported:
        assert lines[-3] == f"IMAGEMATRIX_GPUS={large['uuid']}"
        assert lines[-1] == "IMAGEMATRIX_VRAM_MIB=19073"
    assert len(large["used_by"]) == 2
    cluster.manager.docker("service", "rm", "parts")
