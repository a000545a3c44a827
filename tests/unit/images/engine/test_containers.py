"""Containers of the engine: those that run and those that start."""

import json
import time

import pytest

from imagematrix.errors import EngineError
from imagematrix.images.engine import containers

pytestmark = pytest.mark.usefixtures("docker_host")


def test_running_containers_are_inspected_and_ended_ones_skipped(any_engine):
    any_engine.containers = [{"Id": "a1", "Name": "/web"}, {"Id": "b2", "Name": "/job"}]
    found = [(one.container_id, one.name) for one in containers.list_running()]
    assert found == [("a1", "web"), ("b2", "job")]
    any_engine.containers = []
    assert containers.list_running() == []


def test_containers_are_found_by_a_label(engine):
    listed = [{"Id": "a1", "Names": ["/job"]}, {"Id": "b2", "Names": []}]
    engine.responses["GET", "/containers/json"] = (200, json.dumps(listed).encode())
    assert containers.list_labelled("job=7") == {"a1": "job", "b2": ""}
    assert "all=1" in engine.requests[0]


def test_containers_that_are_just_starting_count_unless_they_are_accounted_for(any_engine):
    now = time.time()
    states = {
        "new": {"Status": "created", "Error": ""},
        "up": {"Status": "running", "Running": True},
        "failed": {"Status": "created", "Error": "no such file"},
        "ended": {"Status": "exited", "Running": False},
    }
    any_engine.containers = [{"Id": "a1"}]
    any_engine.starting = [{"Id": name, "State": state} for name, state in states.items()]
    any_engine.add_image({"io.imagematrix.vram": "1"})
    image = any_engine.images[0]["Id"]
    any_engine.starting[0]["Image"] = image
    any_engine.starting[0]["Config"] = {"Image": "x", "Labels": {"io.imagematrix.vram": "1", "job": "7"}}
    any_engine.created = [
        *({"Id": name, "Created": now} for name in states),
        {"Id": "a1", "Created": now},  # it runs by now
        {"Id": "old", "Created": now - 100},
        {
            "Id": "launch",
            "Created": now,
            "ImageID": image,
            "Labels": {"io.imagematrix.selected": "training:v1-x"},
        },
        {"Id": "task", "Created": now, "ImageID": image, "Labels": {"com.docker.swarm.task.id": "t"}},
    ]
    found = containers.list_running_or_starting()
    assert [one.container_id for one in found] == ["a1", "new", "up"]
    assert (found[1].image, found[1].labels) == ("x", {"job": "7"})
    assert not any(
        name in request for request in any_engine.requests for name in ("/old/", "/launch/", "/task/")
    )
    assert [one.container_id for one in containers.list_running()] == ["a1"]


def test_a_starting_launch_counts_if_nobody_attends_to_it(any_engine):
    selected = "io.imagematrix.selected"
    any_engine.starting = [{"Id": name, "State": {"Status": "created"}} for name in ("one", "two", "task")]
    any_engine.add_image(None)
    facts = {"Created": time.time(), "ImageID": any_engine.images[0]["Id"]}
    any_engine.created = [
        {"Id": "one", "Labels": {selected: "x:1", "number": "1"}} | facts,
        {"Id": "two", "Labels": {selected: "x:1", "number": "2"}} | facts,
        {"Id": "task", "Labels": {"com.docker.swarm.task.id": "t"}} | facts,
    ]
    found = containers.list_running_or_starting(lambda labels: labels["number"] == "1")
    assert [one.container_id for one in found] == ["two"]


@pytest.mark.parametrize("label", ["com.docker.swarm.task.id", "io.imagematrix.selected"])
def test_no_label_of_an_image_hides_a_starting_container(any_engine, label):
    any_engine.add_image({label: "x"})
    any_engine.starting = [{"Id": name, "State": {"Status": "created"}} for name in ("plain", "orphan")]
    any_engine.created = [
        {
            "Id": "plain",
            "Created": time.time(),
            "ImageID": any_engine.images[0]["Id"],
            "Labels": {label: "x"},
        },
        {"Id": "orphan", "Created": time.time(), "ImageID": "removed", "Labels": {label: "x"}},
    ]
    assert [one.container_id for one in containers.list_running_or_starting()] == ["plain", "orphan"]


def test_nvidia_s_runtime_is_recognised_by_its_program(any_engine):
    programs = {
        "gpu": {"path": "/usr/bin/nvidia-container-runtime"},
        "wrapped": {"path": "/opt/run", "runtimeArgs": ["--next=/usr/bin/nvidia-container-runtime"]},
        "typed": {"runtimeType": "io.containerd.runc.v2", "options": {"BinaryName": "/opt/nvidia/runtime"}},
        "sandbox": {"path": "/usr/bin/runsc"},
    }
    any_engine.info["Runtimes"] = programs
    asking = {"Env": ["A=1", "NVIDIA_VISIBLE_DEVICES=1"]}
    any_engine.containers = [
        {"Id": name.replace("-", ""), "HostConfig": {"Runtime": name}, "Config": asking}
        for name in (*programs, "nvidia-legacy", "runc", "unknown")
    ]
    found = {one.container_id: one.devices.requested for one in containers.list_running()}
    assert {name for name, requested in found.items() if requested == ("1",)} == {
        "gpu", "wrapped", "typed", "nvidialegacy",
    }  # fmt: skip
    for environment in (["NVIDIA_VISIBLE_DEVICES=void"], [], None):
        any_engine.containers = [
            {"Id": "a", "HostConfig": {"Runtime": "gpu"}, "Config": {"Env": environment}}
        ]
        any_engine.requests.clear()
        assert containers.list_running()[0].devices.requested == ()
        assert not any(request.endswith("/info") for request in any_engine.requests)


def test_a_container_that_takes_long_to_start_is_not_waited_for(any_engine, monkeypatch):
    monkeypatch.setattr(containers, "START_S", 0.1)
    any_engine.created = [{"Id": "slow", "Created": time.time()}, {"Id": "new", "Created": time.time()}]
    any_engine.starting = [{"Id": "new", "State": {"Status": "created"}}]
    any_engine.before_response["GET", "/containers/slow/json"] = lambda: time.sleep(0.5)
    any_engine.responses["GET", "/containers/slow/json"] = (200, b"{}")
    assert [one.container_id for one in containers.list_running_or_starting()] == ["new"]


def test_labels_inherited_from_the_image_are_excluded(any_engine):
    any_engine.add_image({"from": "image", "both": "image"})
    any_engine.add_image(None)
    labelled, bare = (image["Id"] for image in any_engine.images)
    cases = [
        (labelled, {"from": "image", "both": "launch", "own": "launch"}, {"both": "launch", "own": "launch"}),
        (bare, {"own": "launch"}, {"own": "launch"}),
        (labelled, {}, {}),
        ("sha256:gone", {"own": "launch"}, {}),
        (None, {"own": "launch"}, {}),
    ]
    any_engine.containers = [
        {"Id": f"c{number}", "Image": image, "Config": {"Labels": labels}}
        for number, (image, labels, _) in enumerate(cases)
    ]
    assert [one.labels for one in containers.list_running()] == [own for _, _, own in cases]


def test_error_while_listing_containers_is_reported(any_engine):
    any_engine.status = 500
    with pytest.raises(EngineError):
        containers.list_running()
