"""Services as data, for docker-py, and as docker's command."""

from typing import Any

import pytest

from imagematrix.errors import UsageError
from imagematrix.integrations.swarm.reservation import Reservation
from imagematrix.integrations.swarm.service import SwarmService, make_image_name, make_service_name

SHARE = Reservation(kind="VRAM", count=3814, vram_mib=3814)
GPU = Reservation(kind="NVIDIA-GPU", count=1, constraints=("engine.labels.io.imagematrix.offer!=shares",))


def service(**facts):
    defaults: dict[str, Any] = {
        "name": "s",
        "image": "127.0.0.1:5050/training:v1",
        "command": (),
        "job": False,
        "replicas": 1,
        "reservation": Reservation(),
    }
    return SwarmService(**(defaults | facts))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("training:v1", "127.0.0.1:5050/training:v1"),
        ("ml/training", "127.0.0.1:5050/ml/training:latest"),
        ("registry.example:5000/ml/training:v1-cpu", "127.0.0.1:5050/ml/training:v1-cpu"),
        ("localhost/training:v1", "127.0.0.1:5050/training:v1"),
        (f"reg:5000/t@sha256:{'0' * 64}", f"reg:5000/t@sha256:{'0' * 64}"),
    ],
)
def test_every_node_asks_its_own_resolver(name, expected):
    assert make_image_name(name, "127.0.0.1:5050") == expected


def test_an_invalid_image_name():
    with pytest.raises(UsageError, match="invalid image reference"):
        make_image_name("Training:v1", "127.0.0.1:5050")


def test_the_name_derives_from_the_image():
    assert make_service_name("reg:5000/ml/training:v1", "0a1b") == "training-0a1b"
    assert make_service_name("reg:5000/llama.cpp:v1", "0a1b") == "llama-cpp-0a1b"  # Swarm rejects a dot
    assert len(make_service_name("x" * 200, "0a1b")) < 63


def test_a_job_runs_each_task_once():
    job = service(job=True, replicas=10, reservation=SHARE, command=("train", "--steps=5"))
    arguments = job.to_arguments()
    assert arguments["mode"] == {"ReplicatedJob": {"MaxConcurrent": 10, "TotalCompletions": 10}}
    assert arguments["restart_policy"]["Condition"] == "none"
    assert arguments["args"] == ["train", "--steps=5"]
    assert arguments["labels"] == {"io.imagematrix.swarm": "job"}
    assert arguments["container_labels"] == {
        "io.imagematrix.swarm": "job",
        "io.imagematrix.vram": "3814",
    }
    (reserved,) = arguments["resources"]["Reservations"]["GenericResources"]
    assert reserved == {"DiscreteResourceSpec": {"Kind": "VRAM", "Value": 3814}}


def test_a_service_is_restarted_by_swarm():
    arguments = service(replicas=3, reservation=GPU, constraints=("node.labels.rack == a7",)).to_arguments()
    assert arguments["mode"] == {"replicated": {"Replicas": 3}}
    assert "restart_policy" not in arguments
    assert arguments["constraints"] == [*GPU.constraints, "node.labels.rack == a7"]
    assert arguments["container_labels"]["io.imagematrix.vram"] == "whole"


def test_the_docker_command_is_equivalent():
    words = service(
        job=True,
        replicas=2,
        reservation=SHARE,
        environment=("A=1",),
        networks=("net",),
        volumes=("data:/data", "/etc/x:/x:ro"),
        constraints=("node.role!=manager",),
        command=("train",),
    ).to_command()
    assert words[:6] == [
        *("docker", "service", "create", "--detach"),
        *("--no-resolve-image", "--with-registry-auth"),
    ]
    text = " ".join(words[6:])
    assert text == (
        "--name s --replicas 2 --mode replicated-job --max-concurrent 2 --restart-condition none "
        "--generic-resource VRAM=3814 --constraint node.role!=manager --network net "
        "--mount type=volume,source=data,target=/data --mount type=bind,source=/etc/x,target=/x,readonly "
        "--env A=1 --label io.imagematrix.swarm=job --container-label io.imagematrix.swarm=job "
        "--container-label io.imagematrix.vram=3814 127.0.0.1:5050/training:v1 train"
    )


@pytest.mark.parametrize(
    ("volume", "mount"),
    [
        ("/data,v1:/x", 'type=bind,"source=/data,v1",target=/x'),
        ("data:/x,readonly:ro", 'type=volume,source=data,"target=/x,readonly",readonly'),
        ('/a"b:/x', 'type=bind,"source=/a""b",target=/x'),
    ],
)
def test_what_docker_reads_as_csv_is_quoted(volume, mount):
    made = service(volumes=(volume,))
    words = made.to_command()
    assert words[words.index("--mount") + 1] == mount
    assert made.to_arguments()["mounts"] == [volume]


def test_the_document(conforms):
    document = conforms(service(reservation=SHARE).to_json("abc"))
    assert document["resources"] == {"VRAM": 3814}
    conforms(service().to_json())


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"constraints": ("node.labels.x>=3",)}, "invalid constraint 'node.labels.x>=3'"),
        ({"constraints": ("rack==a7",)}, "invalid constraint 'rack==a7'"),
        ({"volumes": ("/data",)}, "invalid volume '/data'"),
        ({"volumes": ("a:b",)}, "invalid volume 'a:b'"),
        ({"volumes": ("a:/b:rx",)}, "invalid volume 'a:/b:rx'"),
        ({"environment": ("HOME",)}, "invalid variable 'HOME'"),
        ({"environment": ("=x",)}, "invalid variable '=x'"),
        ({"replicas": 0}, "invalid number of replicas 0"),
    ],
)
def test_values_that_swarm_would_refuse_are_refused(facts, message):
    with pytest.raises(UsageError) as refused:
        service(**facts)
    assert str(refused.value).startswith(message)
