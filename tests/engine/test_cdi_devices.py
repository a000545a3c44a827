"""`export cdi`: engines pass exactly the device nodes of the CDI devices that are asked for."""

import json

import pytest
from cdi import LIST

CONTROL = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}
# In the profile GPU 0 has three MIG devices, GPU 1 none.
CAPABILITIES = {"0:2:0": (21, 22), "0:9:0": (84, 85), "0:10:0": (93, 94)}


def caps(*numbers):
    return {f"/dev/nvidia-caps/nvidia-cap{number}" for number in numbers}


@pytest.fixture(scope="module")
def node(simulate):
    """The engine of a machine with MIG devices, with the spec of its GPUs where the engine looks for it."""
    started = simulate("mig")
    done = started.imagematrix("export", "cdi", "-o", started.folder / "cdi")
    assert done.returncode == 0, done.stderr
    return started


@pytest.fixture(scope="module")
def image(node):
    return node.imagematrix("select", "training:v1").stdout.strip()


@pytest.fixture(scope="module")
def expected(node):
    """The device nodes that each CDI device has: as `--gpus` names them, and by UUID."""
    host = json.loads(node.imagematrix("probe", "--json").stdout)
    one, other = host["gpus"]
    nodes = {f"{name}": {"/dev/nvidia0", *caps(*numbers)} for name, numbers in CAPABILITIES.items()}
    nodes |= {part["uuid"]: nodes[f"0:{part['gpu_instance']}:0"] for part in one["mig"]}
    nodes["0"] = nodes[one["uuid"]] = set().union(*nodes.values())
    nodes["1"] = nodes[other["uuid"]] = {"/dev/nvidia1"}
    nodes["all"] = nodes["0"] | nodes["1"]
    return nodes


def test_docker_passes_the_nodes_of_a_device_and_no_others(node, image, expected):
    listed = json.loads((node.folder / "cdi/imagematrix.json").read_text())["devices"]
    assert {device["name"] for device in listed} == expected.keys()
    for name, paths in expected.items():
        ran = node.docker("run", "--rm", "--device", f"imagematrix.io/gpu={name}", image, *LIST)
        assert set(ran.stdout.split()) == paths | CONTROL, name


def test_docker_passes_nothing_without_a_device_and_refuses_unknown_ones(node, image):
    assert node.docker("run", "--rm", image, *LIST).stdout == ""
    refused = node.docker("run", "--device", "imagematrix.io/gpu=7", image, "true", check=False)
    assert refused.returncode != 0
    assert "imagematrix.io/gpu=7" in refused.stderr


def test_a_gpu_of_a_cdi_device_is_in_use(node, image):
    node.docker("run", "-d", "--device", "imagematrix.io/gpu=0:9:0", image, "sleep", "300")
    one, other = json.loads(node.imagematrix("gpus", "--json").stdout)["gpus"]
    assert [part["free"] for part in one["mig"]] == [True, False, True]
    assert other["free"]
    refused = node.imagematrix("run", "--gpus", "device=0:9:0", "training:v1", "true")
    assert refused.returncode == 10, refused.stderr
    node.docker("run", "-d", "--device", "imagematrix.io/gpu=1", image, "sleep", "300")
    assert not json.loads(node.imagematrix("gpus", "--json").stdout)["gpus"][1]["free"]
