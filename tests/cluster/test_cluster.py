"""The fixtures themselves: different machines, one swarm, a registry, and complete clean-up."""

import json

import pytest


@pytest.fixture(scope="module")
def cluster(start_cluster):
    cluster = start_cluster()
    cluster.add("n1", "milan-a10", 1, {"node-generic-resources": ["TEST=GPU-a"]})
    cluster.add("n2", "genoa-h200", 1, {"node-generic-resources": ["TEST=GPU-b"]})
    cluster.form()
    return cluster


def test_each_machine_has_its_own_gpu(cluster):
    names = []
    for node in cluster.nodes:
        (gpu,) = json.loads(node.imagematrix("probe", "--json").stdout)["gpus"]
        names.append(gpu["name"])
        assert node.run("hostname").stdout.strip() == node.name
    assert names == ["NVIDIA A10", "NVIDIA H200"]


def test_a_service_runs_on_all_nodes_and_the_surplus_waits(cluster, base):
    words = ("--no-resolve-image", "--replicas", "3", "--generic-resource", "TEST=1")
    cluster.manager.docker("service", "create", "-d", "--name", "three", *words, base, "sleep", "600")
    cluster.wait(lambda: cluster.states("three") == ["pending", "running", "running"])
    running = [task for task in cluster.tasks("three") if task["Status"]["State"] == "running"]
    assert len({task["NodeID"] for task in running}) == 2
    cluster.manager.docker("service", "rm", "three")
