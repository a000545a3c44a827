"""What a node offers, and how the engine's configuration states it."""

import json

import pytest

from imagematrix.common.record import replace
from imagematrix.errors import ProbeError, UsageError
from imagematrix.hardware.host.host import Driver
from imagematrix.integrations.swarm.node_config import (
    NodeOffer,
    make_offer,
    merge_config,
    parse_engine_config,
)

DRIVER = Driver(version="550.163.01", kind="open", source="/proc")


def test_every_gpu_is_offered_by_its_full_uuid(host):
    offered = make_offer(host(46068, 46068, driver=DRIVER))
    assert offered.resources == ("NVIDIA-GPU=GPU-a", "NVIDIA-GPU=GPU-b")
    assert offered.labels == (
        "io.imagematrix.cpu=x86-64-v3",
        "io.imagematrix.driver=550.163.01",
        "io.imagematrix.driver-branch=550",
        "io.imagematrix.offer=gpus",
        "io.imagematrix.compute=8.9",
        "io.imagematrix.gpu=NVIDIA-L40S",
    )


def test_shares_are_counted_on_each_gpu(host):
    offered = make_offer(host(24564, 10000), "4G")
    assert offered.resources[-1] == "VRAM-4G=8"
    assert "io.imagematrix.offer=shares" in offered.labels


def test_all_memory_of_the_only_gpu(host):
    assert make_offer(host(24564), "all").resources == ("NVIDIA-GPU=GPU-a", "VRAM=24564")


def test_mig_devices_are_offered_instead_of_their_gpu(host, mig):
    offered = make_offer(replace(host(), gpus=(mig,)), "4G")
    assert offered.resources == ("NVIDIA-GPU=MIG-a", "NVIDIA-GPU=MIG-b", "VRAM-4G=4")
    assert "io.imagematrix.mig=1g.10gb" in offered.labels


def test_a_mixed_node_has_joined_labels(host):
    one, two = host(1, 1).gpus
    gpus = (one, replace(two, compute="8.0", name="NVIDIA A100"))
    labels = make_offer(replace(host(), gpus=gpus)).labels
    assert "io.imagematrix.compute=8.0+8.9" in labels
    assert "io.imagematrix.gpu=NVIDIA-A100+NVIDIA-L40S" in labels


def test_a_gpu_that_does_not_work_is_not_offered(host):
    node = host(1, 1)
    offered = make_offer(replace(node, gpus=(node.gpus[0], replace(node.gpus[1], state="lost"))))
    assert offered.resources == ("NVIDIA-GPU=GPU-a",)


def test_a_node_without_a_gpu(host):
    assert make_offer(host(), "4G") == NodeOffer(resources=(), labels=("io.imagematrix.cpu=x86-64-v3",))


@pytest.mark.parametrize(
    ("sizes", "facts", "vram", "error", "message"),
    [
        ((1, 1), {}, "all", UsageError, "^cannot offer the memory of 2 GPUs as one amount"),
        ((1000,), {}, "4G", UsageError, "^no GPU of this node has 4G of memory"),
        ((1000,), {}, "much", UsageError, "^invalid size of shares much"),
        ((1000,), {"memory_mib": None}, "4G", ProbeError, "^memory size of GPU 0 .* unknown"),
        ((1000,), {"uuid": None}, None, ProbeError, "^UUID of GPU 0 .* unknown"),
    ],
)
def test_gpus_and_memory_that_cannot_be_offered(host, sizes, facts, vram, error, message):
    node = host(*sizes)
    with pytest.raises(error, match=message):
        make_offer(replace(node, gpus=tuple(replace(gpu, **facts) for gpu in node.gpus)), vram)


OURS = NodeOffer(resources=("NVIDIA-GPU=GPU-a", "VRAM-4G=6"), labels=("io.imagematrix.cpu=x86-64-v3",))


def test_the_rest_of_the_file_stays():
    config = {
        "log-level": "warn",
        "labels": ["rack=7", "io.imagematrix.cpu=x86-64-v4", "io.imagematrix.gpu=NVIDIA-T4"],
        "node-generic-resources": ["SSD=2", "NVIDIA-GPU=GPU-gone", "VRAM-8G=3", "VRAM=24564"],
        "runtimes": {"nvidia": {"path": "nvidia-container-runtime"}},
    }
    assert merge_config(config, OURS, "/bin/rt") == {
        "log-level": "warn",
        "labels": ["rack=7", "io.imagematrix.cpu=x86-64-v3"],
        "node-generic-resources": ["SSD=2", "NVIDIA-GPU=GPU-a", "VRAM-4G=6"],
        "runtimes": {"nvidia": {"path": "nvidia-container-runtime"}, "imagematrix": {"path": "/bin/rt"}},
        "default-runtime": "imagematrix",
    }


def test_the_second_time_nothing_changes():
    once = merge_config({"default-runtime": "runc"}, OURS, "/bin/rt")
    assert merge_config(once, OURS, "/bin/rt") == once


def test_absent_resources_are_not_listed():
    assert merge_config({}, NodeOffer(resources=(), labels=()), "/bin/rt") == {
        "runtimes": {"imagematrix": {"path": "/bin/rt"}},
        "default-runtime": "imagematrix",
    }
    emptied = merge_config(
        {"node-generic-resources": ["VRAM=1"]}, NodeOffer(resources=(), labels=()), "/bin/rt"
    )
    assert emptied["node-generic-resources"] == []


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("", {}),
        (" \n", {}),
        ('{"debug": true}', {"debug": True}),
        ('{"default-runtime": null}', {"default-runtime": None}),
    ],
)
def test_a_file_is_read(text, config):
    assert parse_engine_config(text, "daemon.json") == config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "invalid JSON: Expecting property name"),
        ("[" * 100_000, "invalid JSON"),
        ([], "not a JSON object"),
        ({"node-generic-resource": ["gpu=a"]}, "invalid key node-generic-resource"),
        ({"node-generic-resources": "gpu=a"}, "node-generic-resources is not a JSON array"),
        ({"labels": {}}, "labels is not a JSON array"),
        ({"hosts": None}, "hosts is not a JSON array"),
        ({"hosts": ["fd://", 5]}, "hosts is not an array of strings"),
        ({"runtimes": []}, "runtimes is not a JSON object"),
        ({"default-runtime": "nvidia"}, "default-runtime is already 'nvidia'"),
        ({"userns-remap": "default"}, "userns-remap is not supported"),
    ],
)
def test_a_file_that_is_refused(config, message):
    with pytest.raises(UsageError, match=f"^daemon.json: {message}"):
        parse_engine_config(config if isinstance(config, str) else json.dumps(config), "daemon.json")
