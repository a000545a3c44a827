"""Starting containers through docker-py, with an engine that only records its calls."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from docker.errors import APIError, DockerException, ImageNotFound
from docker.types import Mount
from double import Double, response
from requests.exceptions import ConnectionError as NoConnection

from imagematrix.errors import AuditError, EngineError, GpusBusyError, UnknownImageError, UsageError
from imagematrix.images.catalog import labels
from imagematrix.images.engine import system
from imagematrix.launcher.docker.devices import DevicesError
from imagematrix.launcher.docker.plan import plan_launch
from imagematrix.launcher.docker.share import Mps, Share
from imagematrix.launcher.gpu_claims.locks import Locks, release_locks
from imagematrix.launcher.launch import launch, make_create_arguments
from imagematrix.selection.selector import select


class Engine(Double):
    """An engine's client and its one container; `running` are others, and it has the `image`, or none."""

    def __init__(self, create=None, start=None, running=(), image=None, name=None):
        self.images = SimpleNamespace()
        self.api = Listing(running, image)
        self.containers = self
        self.name = name
        self.failures = {"create": create, "start": start}
        self.requests = []

    def _do(self, what, **arguments):
        self.requests.append((what, arguments))
        if self.failures.get(what):
            raise self.failures[what]
        return self

    def info(self):
        return {"CDISpecDirs": None, "DefaultRuntime": "runc", "Name": self.name}

    def create(self, **arguments):
        return self._do("create", **arguments)

    def start(self):
        return self._do("start")

    def remove(self, **arguments):
        return self._do("remove", **arguments)


class Listing:
    """The low-level API: the running containers, of which the last ends before it is inspected.

    `image` is the only image.
    """

    base_url, timeout = "http+docker://localhost", 60

    def __init__(self, running, image=None):
        self._running = [{"Id": str(number), **container} for number, container in enumerate(running)]
        self._image = image

    def get(self, resource, **_):
        path, _, query = resource.removeprefix(self.base_url).partition("?")
        found = {f"/containers/{one['Id']}/json": one for one in self._running}
        if path.startswith("/images/"):
            return response(self._image)
        if path != "/containers/json":
            return response(found.get(path))
        if "filters" in query:
            return response([])
        return response([*({"Id": one["Id"]} for one in self._running), {"Id": "gone"}])


def container(*paths):
    """An inspected container with these devices."""
    devices = [{"PathOnHost": path, "PathInContainer": path} for path in paths]
    return {"Name": "/web", "Config": {"Image": "serving:v2"}, "HostConfig": {"Devices": devices}}


@pytest.fixture
def _nodes_work(monkeypatch):
    monkeypatch.setattr("imagematrix.launcher.docker.request.require_device_nodes", lambda _: None)


@pytest.mark.usefixtures("_nodes_work")
def test_a_selection_for_another_architecture_is_not_started(make, monkeypatch):
    engine = Engine()
    monkeypatch.setattr(system, "get_architecture", lambda _: "arm64")
    with pytest.raises(UsageError, match="is for linux/amd64, and its engine runs on linux/arm64"):
        launch(make.selection(make.gpu(0)), client=engine)
    assert engine.requests == []


@pytest.mark.usefixtures("_nodes_work")
def test_a_command_as_text_is_split_as_docker_does(make):
    engine = Engine()
    launch(make.selection(make.gpu(0)), "train --name 'a b'", client=engine)
    assert engine.requests[0][1]["command"] == ["train", "--name", "a b"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wait": "10m"}, "invalid time to wait: '10m'"),
        ({"wait": True}, "invalid time to wait: True"),
        ({"share": 4096}, "4096 is not a Share"),
        ({"gpus": []}, "the list of GPUs is empty"),
        ({"gpus": True}, "invalid GPUs True"),
    ],
)
def test_values_of_other_types_are_usage_errors(make, options, message):
    engine = Engine()
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        launch(make.selection(make.gpu(0)), client=engine, **options)
    assert caught.value.remedy
    with pytest.raises(UsageError, match="is not a Selection"):
        launch(make.host(), client=engine)
    assert engine.requests == []


@pytest.mark.usefixtures("_nodes_work")
def test_the_container_is_created_and_started(make):
    engine = Engine()
    selection = make.selection(make.gpu(0), make.gpu(1))
    assert launch(selection, ["train"], gpus=1, client=engine, name="job") is engine
    (created, given), started = engine.requests
    assert (created, started) == ("create", ("start", {}))
    assert given == {
        "image": "training:v1-x",
        "command": ["train"],
        "name": "job",
        "devices": [f"{path}:{path}:rwm" for path in ("/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm")],
        "environment": {"NVIDIA_VISIBLE_DEVICES": "void"},
        "labels": {
            "io.imagematrix.selected": "training:v1-x",
            "io.imagematrix.vram": "whole",
            "io.imagematrix.gpus": "GPU-0",
        },
    }


@pytest.mark.usefixtures("_nodes_work")
def test_a_share_is_placed_where_it_has_room(make):
    engine = Engine()
    selection = make.selection(make.gpu(0, memory_mib=10_000), make.gpu(1, memory_mib=80_000))
    launch(selection, gpus="1,compute>=8.0", share=Share(vram_mib=40_800), client=engine)
    (_, given), _ = engine.requests
    assert given["devices"][0].startswith("/dev/nvidia4:")
    assert given["environment"]["IMAGEMATRIX_VRAM_FRACTION"] == "0.5000"
    assert given["labels"]["io.imagematrix.vram"] == "40800"
    assert given["labels"]["io.imagematrix.lease"].startswith("share-")


def test_a_share_that_no_gpu_has_room_for_is_an_error(make):
    engine = Engine()
    with pytest.raises(
        UsageError, match=r"requested 1 GPU with 90000 MiB, 0 present: GPU 0 .* has 80000 MiB"
    ):
        launch(make.selection(make.gpu(0, memory_mib=80_000)), share=Share(vram_mib=90_000), client=engine)
    assert engine.requests == []


@pytest.mark.usefixtures("_nodes_work")
def test_a_share_that_is_less_than_the_variant_needs_is_an_error(make):
    engine, selection = Engine(), make.selection(make.gpu(0, memory_mib=80_000))
    catalog = selection.decision.catalog
    needing = replace(catalog, variants=(replace(catalog.variants[0], gpu_memory_mib=16384),))
    chosen = select(selection.host, needing)
    with pytest.raises(
        UsageError, match="needs 16384 MiB of GPU memory, and the share has 8192 MiB"
    ) as caught:
        launch(chosen, share=Share(vram_mib=8192), client=engine)
    assert caught.value.remedy == "select with vram_mib=8192, or launch with a larger share"
    assert engine.requests == []


def test_a_container_without_gpus_has_no_share(make):
    engine = Engine()
    launch(make.selection(mode=None), share=Share(vram_mib=40_800), client=engine)
    assert engine.requests[0][1]["labels"]["io.imagematrix.vram"] == "whole"


@pytest.mark.usefixtures("_nodes_work")
@pytest.mark.parametrize("other", [False, True])
def test_an_image_that_took_the_name_of_the_variant_is_not_started(make, other):
    """It inherits the labels, but has another command."""
    own = {labels.VERSION: "v1", labels.CELL: "x", labels.INPUT: f"sha256:{'1' * 64}"}
    selection = make.selection(
        mode=None, reference=f"training:{labels.make_tag('v1', 'x', own[labels.INPUT])}"
    )
    image = {"Os": "linux", "Architecture": "amd64", "Config": {"Cmd": ["train"], "Labels": own}}
    own[labels.CONTENT] = labels.hash_content(image)
    if other:
        engine = Engine(image=image | {"Config": {"Cmd": ["sh"], "Labels": own}})
        with pytest.raises(AuditError, match="built on the variant"):
            launch(selection, client=engine)
        assert engine.requests == []
    else:
        engine = Engine(image=image)
        assert launch(selection, client=engine) is engine


@pytest.mark.parametrize("mounts", [None, [Mount("/data", "/data", type="bind")]])
def test_mps_adds_its_pipes_and_the_host_ipc(make, mounts):
    planned = plan_launch(make.selection(make.gpu()), share=Share(mps=Mps(pipes="/run/mps")))
    given = make_create_arguments(planned, {"mounts": mounts})
    assert given["ipc_mode"] == "host"
    assert [mount["Target"] for mount in given["mounts"]] == ["/run/mps", *(["/data"] if mounts else [])]
    assert make_create_arguments(planned, {"ipc_mode": "private"})["ipc_mode"] == "private"


def test_the_runtime_injects_gpus_into_images_without_a_driver(make):
    planned = plan_launch(make.selection(make.gpu(), mode="host"))
    given = make_create_arguments(planned, {})
    (request,) = given["device_requests"]
    assert (request["Driver"], request["Capabilities"]) == ("", [["gpu"]])
    assert (request["DeviceIDs"], given["devices"], given["command"]) == (["GPU-0"], [], None)
    named = replace(planned, injected=("nvidia.com/gpu=0",), cdi=True)
    (request,) = make_create_arguments(named, {})["device_requests"]
    assert (request["Driver"], request["DeviceIDs"]) == ("cdi", ["nvidia.com/gpu=0"])


@pytest.mark.usefixtures("_nodes_work")
def test_the_engine_comes_from_the_environment(make, monkeypatch):
    engine = Engine()
    monkeypatch.setattr("imagematrix.images.engine.transport.open_client", lambda: engine)
    assert launch(make.selection(mode=None)) is engine


@pytest.mark.parametrize(
    ("environment", "labels"),
    [({"A": "1"}, {"job": "7"}), (["A=1"], ["job=7"])],
)
def test_the_caller_s_options_are_merged(make, environment, labels):
    planned = plan_launch(make.selection(make.gpu()))
    given = make_create_arguments(
        planned, {"environment": environment, "labels": labels, "devices": ["/dev/fuse"], "command": ["x"]}
    )
    assert given["environment"] == {"NVIDIA_VISIBLE_DEVICES": "void", "A": "1"}
    assert given["labels"]["job"] == "7"
    assert given["labels"]["io.imagematrix.gpus"] == "GPU-0"
    assert given["devices"][-1] == "/dev/fuse"
    assert len(given["devices"]) == 4
    assert given["command"] == ["x"]


def test_the_platform_of_a_cpu_variant_is_passed(make):
    given = make_create_arguments(plan_launch(make.selection(mode=None, platform="linux/amd64/v2")), {})
    assert given["platform"] == "linux/amd64/v2"
    assert "platform" not in make_create_arguments(plan_launch(make.selection(mode=None)), {})


def test_nodes_are_checked_first(make):
    engine = Engine()
    with pytest.raises(DevicesError, match="/dev/nvidia254: not found"):
        launch(make.selection(make.gpu(minor=254)), client=engine)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (ImageNotFound("gone"), UnknownImageError),
        (APIError("no"), EngineError),
        (DockerException("no engine"), EngineError),
        (NoConnection("refused"), EngineError),
    ],
)
def test_errors_of_the_engine(make, failure, error):
    with pytest.raises(error, match="training:v1-x"):
        launch(make.selection(mode=None), client=Engine(create=failure))


def test_an_engine_on_another_machine_is_refused(make, locks):
    engine = Engine(name="node17")
    engine.api.base_url = "http+docker://ssh"
    with pytest.raises(UsageError, match="the engine runs on node17") as caught:
        launch(make.selection(make.gpu(0)), client=engine)
    assert "call it on node17" in caught.value.remedy
    assert not Path(locks).exists() or Locks(locks).list_names() == []
    engine.name = os.uname().nodename
    launch(make.selection(mode=None), client=engine)


@pytest.mark.usefixtures("_nodes_work")
def test_gpus_in_use_are_not_claimed(make):
    engine = Engine(running=[container("/dev/nvidiactl", "/dev/nvidia3")])
    selection = make.selection(make.gpu(0), make.gpu(1))
    launch(selection, gpus=1, client=engine)
    assert engine.requests[0][1]["labels"]["io.imagematrix.gpus"] == "GPU-1"
    with pytest.raises(
        GpusBusyError, match=r"requested 2 GPUs, 1 free: GPU 0 .* container web \(serving:v2\)"
    ):
        launch(selection, client=engine)


@pytest.mark.usefixtures("_nodes_work")
@pytest.mark.parametrize("failure", [None, APIError("no such device")])
def test_a_launch_releases_its_lease(make, locks, failure):
    with contextlib.suppress(EngineError):
        launch(make.selection(make.gpu(0)), client=Engine(start=failure))
    with Locks(locks) as folder:
        assert folder.find_holders() == {}
        assert folder.list_names() == ["nvidia3", "turn"]


@pytest.mark.parametrize("failure", [APIError("no such device"), KeyboardInterrupt()])
def test_a_container_that_never_ran_is_removed(make, failure):
    engine = Engine(start=failure)
    with pytest.raises((EngineError, KeyboardInterrupt)):
        launch(make.selection(mode=None), client=engine)
    assert engine.requests[-1] == ("remove", {"force": True})


@pytest.mark.usefixtures("_nodes_work")
@pytest.mark.parametrize("mode", ["exact", None])
def test_gpus_in_the_caller_s_options_are_claimed(make, locks, mode):
    gpus = (make.gpu(0), make.gpu(1))
    selection = make.selection(*gpus, mode=mode, wanted="device=0" if mode else "none")
    with Locks(locks) as folder:
        held = folder.take("nvidia4")
        with pytest.raises(GpusBusyError, match="GPU 1"):
            launch(selection, client=Engine(), devices=["/dev/nvidia4"])
        release_locks(held)
    engine = Engine()
    assert launch(selection, client=engine, devices=["/dev/nvidia4"]) is engine


@pytest.mark.usefixtures("_nodes_work")
def test_a_privileged_container_shows_all_the_gpus_that_it_may_use(make):
    engine = Engine()
    launch(make.selection(make.gpu(0), make.gpu(1)), gpus=1, client=engine, privileged=True)
    (_, given), _ = engine.requests
    assert [path for path in given["devices"] if path.startswith(("/dev/nvidia3", "/dev/nvidia4"))] == [
        "/dev/nvidia3:/dev/nvidia3:rwm",
        "/dev/nvidia4:/dev/nvidia4:rwm",
    ]
    assert given["labels"]["io.imagematrix.gpus"] == "GPU-0"
