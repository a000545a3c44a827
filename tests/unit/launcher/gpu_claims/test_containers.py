"""Which GPUs a container uses, from the engine's description of it."""

import os

import pytest

from imagematrix.images.engine.containers import parse_container
from imagematrix.launcher.gpu_claims import containers as module
from imagematrix.launcher.gpu_claims.usage import Consumer


def devices(*paths):
    return {"HostConfig": {"Devices": [{"PathOnHost": path} for path in paths]}}


def requests(**request):
    return {"HostConfig": {"Devices": None, "DeviceRequests": [request]}}


def runtime(*environment, runtime="nvidia"):
    return {"HostConfig": {"Runtime": runtime}, "Config": {"Env": list(environment)}}


def rules(*texts):
    return {"HostConfig": {"DeviceCgroupRules": list(texts)}}


def compute_container_usage(documents, gpus):
    """Return the usage by containers as an engine describes them."""
    running = [parse_container(document, dict, {}) for document in documents]
    return module.compute_container_usage(running, gpus)


EVERY = ["nvidia10", "nvidia11-gi1-ci0", "nvidia11-gi2-ci0"]


@pytest.fixture
def gpus(gpu):
    """Two GPUs with the minors 10 and 11, the second in MIG mode, and one whose minor is unknown."""
    return (gpu(0, pci_bus_id="0000:41:00.0"), gpu(1, mig=((1, 0), (2, 0))), gpu(2, minor=None))


@pytest.mark.parametrize(
    ("container", "keys"),
    [
        ({}, []),
        ({"HostConfig": None, "Config": None}, []),
        (devices("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-modeset", "/dev/fuse"), []),
        (devices("/dev/nvidiactl", "/dev/nvidia10"), ["nvidia10"]),
        (devices("/dev/nvidia7"), ["nvidia7"]),  # also a GPU that the probe did not find
        (devices("/dev/nvidia11"), ["nvidia11"]),
        (
            devices("/dev/nvidia11", "/dev/nvidia-caps/nvidia-cap10", "/dev/nvidia-caps/nvidia-cap11"),
            ["nvidia11-gi1-ci0"],
        ),
        (devices("/dev/nvidia10", "/dev/nvidia-caps/nvidia-cap1"), ["nvidia10"]),
        (requests(Driver="", Count=-1, Capabilities=[["gpu"]]), EVERY),
        (requests(Driver="nvidia", Count=1), ["nvidia10"]),
        (requests(Count=2, Capabilities=[["compute", "gpu"]]), EVERY),
        (requests(DeviceIDs=["GPU-0"], Capabilities=[["gpu"]]), ["nvidia10"]),
        (requests(DeviceIDs=["MIG-2-0"], Capabilities=[["gpu"]]), ["nvidia11-gi2-ci0"]),
        (requests(DeviceIDs=["1:0"], Capabilities=[["gpu"]]), ["nvidia11"]),
        (requests(DeviceIDs=["2", "9", "GPU-x"], Capabilities=[["gpu"]]), []),
        (requests(Driver="cdi", DeviceIDs=["nvidia.com/gpu=0"]), ["nvidia10"]),
        (requests(Driver="cdi", DeviceIDs=["nvidia.com/gpu=all"]), EVERY),
        (requests(Driver="cdi", DeviceIDs=["imagematrix.io/gpu=0"]), ["nvidia10"]),
        (requests(Driver="cdi", DeviceIDs=["imagematrix.io/gpu=GPU-0"]), ["nvidia10"]),
        (requests(Driver="cdi", DeviceIDs=["imagematrix.io/gpu=GPU-"]), []),  # no start of a UUID
        (requests(Driver="cdi", DeviceIDs=["imagematrix.io/gpu=1"]), EVERY[1:]),
        (requests(Driver="cdi", DeviceIDs=["imagematrix.io/gpu=1:2:0"]), ["nvidia11-gi2-ci0"]),
        (requests(Driver="cdi", DeviceIDs=["imagematrix.io/gpu=MIG-1-0"]), ["nvidia11-gi1-ci0"]),
        (requests(Driver="cdi", DeviceIDs=["imagematrix.io/gpu=all"]), EVERY),
        (requests(Driver="cdi", DeviceIDs=["imagematrix.io/gpu=2", "imagematrix.io/claim=0"]), []),
        (requests(Driver="cdi", DeviceIDs=["vendor.com/net=0"]), []),
        (requests(Driver="amd", Count=-1, Capabilities=[["gpu"]]), []),
        (requests(Count=-1, Capabilities=[["tpu"]]), []),
        (requests(Count=-1, Capabilities=None), []),
        (requests(DeviceIDs=["0"], Capabilities=[["nvidia", "compute", "utility"]]), ["nvidia10"]),
        (requests(DeviceIDs=["0"], Capabilities=[["tpu"], ["utility"]]), ["nvidia10"]),
        (requests(Driver="nvidia.cdi", DeviceIDs=["0"]), ["nvidia10"]),
        (rules("c 195:10 rw"), ["nvidia10"]),
        (rules("c 195:10 m"), []),  # it may create the node, but not open it
        (rules("b 195:10 rwm"), []),
        (rules("c 195:7 r"), ["nvidia7"]),
        (rules("c 10:* rwm"), []),
        (rules("c 195:* rwm"), ["nvidia10", "nvidia11"]),
        (rules("c *:10 rwm"), ["nvidia10"]),
        (rules("c *:* rwm"), EVERY),
        (rules("a *:* rwm"), EVERY),
        (rules("c 1:3"), []),
        (rules("nonsense"), []),
        (devices("//dev"), EVERY),
        (devices("/"), EVERY),
        (runtime("A=1", "NVIDIA_VISIBLE_DEVICES=0"), ["nvidia10"]),
        (runtime("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=GPU-0"), ["nvidia10"]),
        (runtime("NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0"), ["nvidia10"]),
        (runtime("NVIDIA_VISIBLE_DEVICES=runtime.nvidia.com/gpu=gpu0"), ["nvidia10"]),
        (runtime("NVIDIA_VISIBLE_DEVICES=notnvidia.com/gpu=0"), []),
        (runtime("NVIDIA_VISIBLE_DEVICES=x, 0"), ["nvidia10"]),
        (runtime("NVIDIA_VISIBLE_DEVICES=0", runtime="nvidia-cdi"), ["nvidia10"]),
        (runtime("NVIDIA_VISIBLE_DEVICES=gpu-0"), ["nvidia10"]),
        (runtime("NVIDIA_VISIBLE_DEVICES=GPU-"), EVERY),
        (runtime("NVIDIA_VISIBLE_DEVICES=0:41:00.0"), ["nvidia10"]),
        (runtime("NVIDIA_VISIBLE_DEVICES=0:41:0"), ["nvidia10"]),
        (runtime("NVIDIA_VISIBLE_DEVICES=00000000:42:00.0"), []),
        (runtime("NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=mig1:0"), ["nvidia11"]),
        (runtime("NVIDIA_VISIBLE_DEVICES=void"), []),
        (runtime("NVIDIA_VISIBLE_DEVICES="), []),
        (runtime(), []),
        (runtime("NVIDIA_VISIBLE_DEVICES=all", runtime="runc"), []),
    ],
)
def test_the_gpus_of_a_container(gpus, container, keys):
    assert sorted(compute_container_usage([container], gpus)) == keys


def test_a_folder_of_nodes_passes_those_in_it(gpus, monkeypatch, tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "x").symlink_to("/dev/null")
    monkeypatch.setattr(module, "MAJOR", 1)  # of /dev/null, whose minor is 3
    assert sorted(compute_container_usage([devices(str(tmp_path))], gpus)) == ["nvidia3"]


def test_a_rule_for_the_number_of_a_node(gpus, monkeypatch):
    """Whatever number a GPU's node has, such as that of /dev/null here."""
    monkeypatch.setattr(os, "stat", lambda _, stat=os.stat: stat("/dev/null"))
    assert sorted(compute_container_usage([rules("c 1:3 rw")], gpus)) == EVERY
    assert sorted(compute_container_usage([rules("c *:3 rw")], gpus)) == EVERY
    assert compute_container_usage([rules("c 1:4 rw", "c 2:3 rw")], gpus) == {}


@pytest.mark.parametrize("address", ["0000:41:00.1", "virtual"])
def test_a_gpu_at_an_unusual_address_is_not_taken_for_another(gpu, address):
    gpus = (gpu(0, pci_bus_id=address),)
    assert compute_container_usage([runtime("NVIDIA_VISIBLE_DEVICES=GPU-elsewhere")], gpus) == {}
    assert sorted(compute_container_usage([runtime("NVIDIA_VISIBLE_DEVICES=0000:41:00.1")], gpus)) == (
        ["nvidia10"] if address[0] == "0" else []
    )


@pytest.mark.parametrize(
    ("states", "keys"),
    [
        (("ok", "ok", "ok"), ["nvidia11"]),
        # A GPU that belongs to a virtual machine has no number.
        (("no-module", "ok", "ok"), ["nvidia12"]),
        # A GPU that does not work may have a number: the next GPU has one of two numbers.
        (("failed", "ok", "ok"), ["nvidia11", "nvidia12"]),
        (("ok", "ok", "failed"), ["nvidia11"]),
    ],
)
def test_numbers_count_the_gpus_that_the_runtime_sees(gpu, states, keys):
    gpus = tuple(
        gpu(index, state=state, **({"minor": None} if state == "no-module" else {}))
        for index, state in enumerate(states)
    )
    assert sorted(compute_container_usage([requests(DeviceIDs=["1"], Capabilities=[["gpu"]])], gpus)) == keys


def test_several_containers_can_use_the_same_gpu(gpus):
    web, job = (
        {"Name": name, "Config": {"Image": "x:1"}} | devices("/dev/nvidia10") for name in ("/web", "/job")
    )
    assert compute_container_usage([web, job], gpus) == {
        "nvidia10": (
            Consumer(kind="container", name="web (x:1)"),
            Consumer(kind="container", name="job (x:1)"),
        )
    }
