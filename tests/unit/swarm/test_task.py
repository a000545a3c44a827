"""Only the variables that Swarm sets count."""

import pytest

from imagematrix.errors import ProbeError, UsageError
from imagematrix.swarm import task
from imagematrix.swarm.task import Assigned, assigned

GPU = "DOCKER_RESOURCE_NVIDIA-GPU="


def test_the_container_of_a_task(record, tmp_path):
    container = record(f"{GPU}GPU-a", "PATH=/bin")
    read_task = task.read(str(tmp_path), container)
    assert (read_task.name, read_task.image, read_task.image_id) == ("train.1.x7", "training:v1", "sha256:0")
    assert read_task.environment == (f"{GPU}GPU-a", "PATH=/bin")


def test_a_container_outside_swarm_is_not_a_task(record, tmp_path):
    assert task.read(str(tmp_path), record(f"{GPU}GPU-a", managed=False)) is None
    labels = {"com.docker.swarm.task.id": "x7"}
    config = {"Image": "training:v1", "Env": [f"{GPU}GPU-a"], "Labels": labels}
    assert task.read(str(tmp_path), record(managed="true", Config=config)) is None


def test_a_missing_record(tmp_path):
    with pytest.raises(ProbeError, match=r"cannot be read: .*/none/config.v2.json: No such file"):
        task.read(str(tmp_path), "none")


@pytest.mark.parametrize("config", [None, [], {}])
def test_a_damaged_record(record, tmp_path, config):
    with pytest.raises(ProbeError, match="malformed"):
        task.read(str(tmp_path), record(Config=config))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ((), Assigned()),
        (("DOCKER_RESOURCE_SSD=2", "DOCKER_RESOURCE_GPU=GPU-a", "NVIDIA-GPU=GPU-a"), Assigned()),
        ((f"{GPU}GPU-a",), Assigned(uuids=("GPU-a",))),
        ((f"{GPU}GPU-a,MIG-b",), Assigned(uuids=("GPU-a", "MIG-b"))),
        ((f"{GPU}GPU-of-the-service", f"{GPU}GPU-a"), Assigned(uuids=("GPU-a",))),
        ((GPU,), Assigned()),
        (("DOCKER_RESOURCE_VRAM=4000",), Assigned(vram_mib=4000)),
        (("DOCKER_RESOURCE_VRAM-4G=1",), Assigned(vram_mib=3814)),
        (("DOCKER_RESOURCE_VRAM-4GI=1",), Assigned(vram_mib=4096)),
    ],
)
def test_assigned_resources(environment, expected):
    result = assigned(environment, ())
    assert result == expected
    assert bool(result) is (expected != Assigned())


def test_an_image_assigns_nothing():
    image = ("PATH=/bin", f"{GPU}GPU-a", "DOCKER_RESOURCE_VRAM=1000")
    assert not assigned(image, image)
    assert assigned(("PATH=/bin", f"{GPU}GPU-b", "DOCKER_RESOURCE_VRAM=1000"), image).uuids == ("GPU-b",)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (("DOCKER_RESOURCE_VRAM=some",), "invalid DOCKER_RESOURCE_VRAM: 'some'"),
        (("DOCKER_RESOURCE_VRAM=0",), "invalid DOCKER_RESOURCE_VRAM: '0'"),
        (("DOCKER_RESOURCE_VRAM-4G=2",), "requested 2 shares of VRAM-4G: they may be on different GPUs"),
        ((f"{GPU}GPU-a", "DOCKER_RESOURCE_VRAM=1"), "this task has NVIDIA-GPU, VRAM"),
    ],
)
def test_invalid_assignments(environment, message):
    with pytest.raises(UsageError, match=message):
        assigned(environment, ())
