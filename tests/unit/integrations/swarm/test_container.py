"""Only the variables that Swarm sets count; devices and variables are added for cgroups of both versions."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from imagematrix.errors import ProbeError, UsageError
from imagematrix.integrations.swarm.container import (
    AssignedGpus,
    parse_assigned_gpus,
    read_task_container,
    rewrite_bundle,
    with_devices,
    with_environment,
)

GPU = "DOCKER_RESOURCE_NVIDIA-GPU="
NULL = {"type": "c", "major": 1, "minor": 3}
DENY = {"allow": False, "access": "rwm"}


def test_the_container_of_a_task(record, tmp_path):
    created = read_task_container(str(tmp_path), record(f"{GPU}GPU-a", "PATH=/bin"))
    assert (created.name, created.image, created.image_id) == ("train.1.x7", "training:v1", "sha256:0")
    assert created.environment == (f"{GPU}GPU-a", "PATH=/bin")


def test_a_container_outside_swarm_is_not_a_task(record, tmp_path):
    assert read_task_container(str(tmp_path), record(f"{GPU}GPU-a", managed=False)) is None
    labels = {"com.docker.swarm.task.id": "x7"}
    config = {"Image": "training:v1", "Env": [f"{GPU}GPU-a"], "Labels": labels}
    assert read_task_container(str(tmp_path), record(managed="true", Config=config)) is None


def test_a_missing_record(tmp_path):
    with pytest.raises(ProbeError, match=r"cannot be read: .*/none/config.v2.json: No such file"):
        read_task_container(str(tmp_path), "none")


@pytest.mark.parametrize("config", [None, [], {}])
def test_a_damaged_record(record, tmp_path, config):
    with pytest.raises(ProbeError, match="malformed"):
        read_task_container(str(tmp_path), record(Config=config))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ((), AssignedGpus()),
        (("DOCKER_RESOURCE_SSD=2", "DOCKER_RESOURCE_GPU=GPU-a", "NVIDIA-GPU=GPU-a"), AssignedGpus()),
        ((f"{GPU}GPU-a",), AssignedGpus(uuids=("GPU-a",))),
        ((f"{GPU}GPU-a,MIG-b",), AssignedGpus(uuids=("GPU-a", "MIG-b"))),
        ((f"{GPU}GPU-of-the-service", f"{GPU}GPU-a"), AssignedGpus(uuids=("GPU-a",))),
        ((GPU,), AssignedGpus()),
        (("DOCKER_RESOURCE_VRAM=4000",), AssignedGpus(vram_mib=4000)),
        (("DOCKER_RESOURCE_VRAM-4G=1",), AssignedGpus(vram_mib=3814)),
        (("DOCKER_RESOURCE_VRAM-4GI=1",), AssignedGpus(vram_mib=4096)),
    ],
)
def test_assigned_resources(environment, expected):
    result = parse_assigned_gpus(environment, ())
    assert result == expected
    assert bool(result) is (expected != AssignedGpus())


def test_an_image_assigns_nothing():
    image = ("PATH=/bin", f"{GPU}GPU-a", "DOCKER_RESOURCE_VRAM=1000")
    assert not parse_assigned_gpus(image, image)
    assert parse_assigned_gpus(("PATH=/bin", f"{GPU}GPU-b", "DOCKER_RESOURCE_VRAM=1000"), image).uuids == (
        "GPU-b",
    )


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
        parse_assigned_gpus(environment, ())


def test_a_device_has_a_node_and_a_rule():
    spec: dict[str, Any] = {
        "linux": {"resources": {"devices": [DENY], "memory": {"limit": 1}}, "namespaces": []}
    }
    linux = with_devices(spec, ["/dev/null"])["linux"]
    mode = stat.S_IMODE(Path("/dev/null").stat().st_mode)
    assert linux["devices"] == [{"path": "/dev/null", **NULL, "fileMode": mode, "uid": 0, "gid": 0}]
    assert linux["resources"]["devices"] == [DENY, {"allow": True, **NULL, "access": "rwm"}]
    assert linux["resources"]["memory"] == {"limit": 1}
    assert linux["namespaces"] == []
    assert spec["linux"]["resources"]["devices"] == [DENY]


def test_an_existing_node_stays_and_may_be_used():
    given = {"path": "/dev/null", **NULL, "fileMode": 0o600}
    linux = with_devices({"linux": {"devices": [given]}}, ["/dev/null"])["linux"]
    assert linux["devices"] == [given]
    assert len(linux["resources"]["devices"]) == 1


def test_a_variable_replaces_another():
    spec = {"process": {"env": ["A=1", "IMAGEMATRIX_GPUS=all", "B=2"], "cwd": "/"}}
    process = with_environment(spec, {"IMAGEMATRIX_GPUS": "GPU-a"})["process"]
    assert process == {"env": ["A=1", "B=2", "IMAGEMATRIX_GPUS=GPU-a"], "cwd": "/"}


def test_the_file_is_rewritten(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"linux": {}, "process": {}, "root": {"path": "rootfs"}}))
    file.chmod(0o600)
    rewrite_bundle(str(tmp_path), ["/dev/null"], {"A": "1"})
    spec = json.loads(file.read_text())
    assert spec["linux"]["devices"][0]["path"] == "/dev/null"
    assert spec["process"]["env"] == ["A=1"]
    assert spec["root"] == {"path": "rootfs"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"linux": {}}'])
def test_a_malformed_file(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ProbeError, match=r"config.json is malformed"):
        rewrite_bundle(str(tmp_path), [], {})
    assert (tmp_path / "config.json").read_text() == text


def test_a_missing_device(tmp_path):
    (tmp_path / "config.json").write_text('{"linux": {}, "process": {}}')
    with pytest.raises(ProbeError, match=r"/dev/nvidia77: No such file"):
        rewrite_bundle(str(tmp_path), ["/dev/nvidia77"], {})
