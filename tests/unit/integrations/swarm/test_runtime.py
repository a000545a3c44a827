"""The runtime gives a new container the GPUs that Swarm assigned, if they are free."""

import json
import os
import time
import zipfile

import pytest

from imagematrix.common.record import replace
from imagematrix.errors import EngineError, GpusBusyError, ProbeError, UsageError
from imagematrix.hardware.host.host import Driver
from imagematrix.hardware.host.nvml import Nvml
from imagematrix.images.engine.containers import PassedDevices, RunningContainer
from imagematrix.integrations.swarm import node, runtime
from imagematrix.integrations.swarm.runtime import RuntimeCall, RuntimeSettings
from imagematrix.launcher.gpu_claims import grants, processes
from imagematrix.launcher.gpu_claims.locks import Locks
from imagematrix.launcher.gpu_claims.usage import Consumer

GPU = "DOCKER_RESOURCE_NVIDIA-GPU="
DRIVER = Driver(version="550.163.01", kind="open", source="/proc")


@pytest.fixture
def nodes(monkeypatch):
    """Let every device node exist."""
    monkeypatch.setattr(runtime, "list_device_nodes", lambda _, gpus: ["/dev/null"] * len(gpus))


@pytest.fixture
def settings(host, engine, tmp_path, monkeypatch, nodes):  # noqa: ARG001 - their effects are wanted
    """Two GPUs, on an engine whose records are below `tmp_path`, without waiting."""
    monkeypatch.setenv("IMAGEMATRIX_LOCKS", str(tmp_path / "other"))  # as the engine may have been started
    monkeypatch.setattr(runtime, "WAIT_S", 0.0)
    engine.add_image({}, Env=["PATH=/bin"])
    image = engine.images[0]["Id"]
    monkeypatch.setattr(node, "keep_present_gpus", lambda host, _: host)
    created = RuntimeSettings(
        data_root=str(tmp_path),
        address=os.environ["DOCKER_HOST"],
        host=host(24564, 12000, driver=DRIVER),
        locks=str(tmp_path / "locks"),
    )
    engine.image_id = image
    return created


@pytest.fixture
def start(settings, record, engine, tmp_path):
    """Create the container of a task with these variables; return its config.json."""

    def create(*environment, container="c1", **facts):
        record(*environment, container=container, **({"Image": engine.image_id} | facts))
        folder = tmp_path / "bundles" / container
        folder.mkdir(parents=True, exist_ok=True)
        spec = {"linux": {}, "process": {"env": list(environment)}}
        (folder / "config.json").write_text(json.dumps(spec))
        runtime.give_gpus(settings, container, str(folder))
        return json.loads((folder / "config.json").read_text())

    return create


@pytest.fixture
def usage(tmp_path):
    """Return the names of the users of each GPU."""

    def read():
        with Locks(str(tmp_path / "locks")) as locks:
            return {
                key: [one.name for one in using] for key, using in grants.compute_grant_usage(locks).items()
            }

    return read


def variables(spec):
    return dict(entry.split("=", 1) for entry in spec["process"]["env"])


def test_a_gpu_by_name(start, usage):
    spec = start(f"{GPU}GPU-b", "A=1")
    assert [device["path"] for device in spec["linux"]["devices"]] == ["/dev/null"]
    assert variables(spec) == {GPU[:-1]: "GPU-b", "A": "1", "IMAGEMATRIX_GPUS": "GPU-b"}
    assert usage() == {"nvidia1": ["train.1.x7 (training:v1)"]}


def test_a_share_gets_its_fraction_of_the_gpus_memory(start, usage):
    shares = [variables(start("DOCKER_RESOURCE_VRAM-4G=1", container=f"c{number}")) for number in range(4)]
    # The smaller GPU first: it has the least memory left.
    assert [one["IMAGEMATRIX_GPUS"] for one in shares] == ["GPU-b"] * 3 + ["GPU-a"]
    assert shares[0]["IMAGEMATRIX_VRAM_MIB"] == "3814"
    assert shares[0]["IMAGEMATRIX_VRAM_FRACTION"] == "0.2511"  # (3814 - 800) / 12000
    assert shares[3]["IMAGEMATRIX_VRAM_FRACTION"] == "0.1226"  # (3814 - 800) / 24564
    assert {key: len(names) for key, names in usage().items()} == {"nvidia1": 3, "nvidia0": 1}


def test_a_share_in_mib(start):
    assert variables(start("DOCKER_RESOURCE_VRAM=20000"))["IMAGEMATRIX_GPUS"] == "GPU-a"


def test_a_gpu_is_given_once(start, usage):
    start(f"{GPU}GPU-a")
    with pytest.raises(GpusBusyError, match=r"in use by container train\.1\.x7"):
        start(f"{GPU}GPU-a", container="c2")
    with pytest.raises(GpusBusyError, match="requested 1 GPU with 20000 MiB free"):
        start("DOCKER_RESOURCE_VRAM=20000", container="c2")
    assert list(usage()) == ["nvidia0"]


def test_a_container_that_starts_again_does_not_block_itself(start):
    assert start(f"{GPU}GPU-a") == start(f"{GPU}GPU-a")


def test_a_gpu_that_a_container_has(start, engine):
    other = {"Id": "c9", "Name": "/other", "HostConfig": {"Devices": [{"PathOnHost": "/dev/nvidia0"}]}}
    engine.containers.append(other)
    with pytest.raises(GpusBusyError, match="in use by container other"):
        start(f"{GPU}GPU-a")
    assert variables(start(f"{GPU}GPU-b"))["IMAGEMATRIX_GPUS"] == "GPU-b"


def test_a_gpu_of_a_container_that_starts_without_a_lease(start, engine):
    """As that of a launch that was killed. Tasks that start may wait for this one, and are not asked."""
    labels = {"io.imagematrix.selected": "x:1", "io.imagematrix.gpus": "GPU-a"}
    entry = {"Id": "c9", "Created": time.time(), "ImageID": engine.image_id}
    task = {"Id": "c8", "Labels": {"com.docker.swarm.task.id": "t"}}
    engine.created = [{**entry, "Labels": labels}, {**entry, **task}]
    devices = [{"PathOnHost": "/dev/nvidia0"}]
    state = {"State": {"Status": "created"}, "HostConfig": {"Devices": devices}}
    engine.starting = [{"Id": "c9", "Name": "/killed"} | state, {"Id": "c8"} | state]
    with pytest.raises(GpusBusyError, match=r"in use by container killed [^;]*$"):
        start(f"{GPU}GPU-a")
    assert not any("/c8/" in request for request in engine.requests)


def test_a_gpu_that_a_container_of_another_engine_has(start, monkeypatch):
    devices = PassedDevices(paths=("/dev/nvidia0",))
    found = RunningContainer(container_id="c9", name="far", image=None, devices=devices)
    monkeypatch.setattr(
        "imagematrix.launcher.gpu_claims.other_engines.find_other_containers", lambda *_, **__: [found]
    )
    with pytest.raises(GpusBusyError, match="in use by container far"):
        start(f"{GPU}GPU-a")


def test_a_gpu_that_a_process_has_open(start, monkeypatch):
    usage = {"nvidia0": (Consumer(kind="process", name="train", pid=7),)}
    monkeypatch.setattr(processes, "compute_open_node_usage", lambda _: usage)
    monkeypatch.setattr(runtime, "query_nvml", lambda: Nvml(gpus=()))
    with pytest.raises(GpusBusyError, match=r"in use by process train \(pid 7\)"):
        start(f"{GPU}GPU-a")


def test_without_a_driver_no_process_has_a_gpu(start, monkeypatch):
    monkeypatch.setattr(node, "keep_present_gpus", lambda host, _: replace(host, driver=None))
    monkeypatch.setattr(processes, "compute_open_node_usage", lambda _: pytest.fail("looked for processes"))
    assert variables(start(f"{GPU}GPU-a"))["IMAGEMATRIX_GPUS"] == "GPU-a"


def test_other_containers_get_nothing(start, usage, engine):
    environment = f"{GPU}GPU-a"
    assert "devices" not in start(environment, Managed=False)["linux"]
    engine.images[0]["Env"] = [environment]
    assert "devices" not in start(environment)["linux"]
    assert "devices" not in start("A=1")["linux"]
    assert usage() == {}


@pytest.mark.parametrize(
    ("environment", "error", "message"),
    [
        (f"{GPU}GPU-x", ProbeError, "^Swarm assigned GPU-x, which this node does not have"),
        ("DOCKER_RESOURCE_VRAM=100", UsageError, "share of 100 MiB too small"),
        ("DOCKER_RESOURCE_VRAM=90000", UsageError, "requested 1 GPU with 90000 MiB, 0 present"),
    ],
)
def test_assignments_that_cannot_be_served(start, usage, environment, error, message):
    with pytest.raises(error, match=message):
        start(environment)
    assert usage() == {}


def test_a_share_on_a_node_that_has_lost_its_gpus(start, monkeypatch):
    monkeypatch.setattr(node, "keep_present_gpus", lambda host, _: replace(host, gpus=()))
    with pytest.raises(ProbeError, match=r"^Swarm assigned 4000 MiB, but this node has no GPU"):
        start("DOCKER_RESOURCE_VRAM=4000")


def test_a_missing_image(start):
    with pytest.raises(EngineError, match="refused: no such image"):
        start(f"{GPU}GPU-a", Image="sha256:gone")


CREATED = {"command": "create", "container": "c1", "bundle": "/b", "log": "/l"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        ("--version", {}),
        ("state c1", {"command": "state", "container": "c1"}),
        ("--root /r --log=/l --systemd-cgroup create --bundle /b --pid-file /p c1", CREATED),
        ("-log /l create -b /b c1", CREATED),
        ("kill c1 9", {"command": "kill", "container": "c1"}),
        ("--log create state c1", {"command": "state", "container": "c1", "log": "create"}),
    ],
)
def test_command_lines_of_runc(line, expected):
    assert RuntimeCall.parse(tuple(line.split())) == RuntimeCall(**expected)


def test_settings_survive_a_round_trip(settings):
    assert RuntimeSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings


class TestMain:
    """The runtime as a program that becomes runc."""

    @pytest.fixture
    def call(self, settings, tmp_path, monkeypatch):
        """Return a function that runs the runtime with words for runc, and returns the calls of runc."""

        archive = tmp_path / "archive"
        with zipfile.ZipFile(archive, "w") as opened:
            opened.writestr("settings.json", json.dumps(settings.to_json()))
        became = []
        monkeypatch.setattr(os, "execv", lambda *words: became.append(words))

        def main(*words):
            monkeypatch.setattr("sys.argv", ["-c", str(archive), "/sbin/runc", *words])
            runtime.main()
            return became

        return main

    def test_a_container_that_gets_a_gpu(self, call, record, engine, tmp_path):
        record(f"{GPU}GPU-a", Image=engine.image_id)
        (tmp_path / "config.json").write_text('{"linux": {}, "process": {}}')
        words = ("create", "--bundle", str(tmp_path), "c1")
        assert call(*words) == [("/sbin/runc", ["/sbin/runc", *words])]
        assert "IMAGEMATRIX_GPUS=GPU-a" in (tmp_path / "config.json").read_text()

    def test_other_commands_go_to_runc(self, call):
        assert call("state", "c1") == [("/sbin/runc", ["/sbin/runc", "state", "c1"])]

    def test_an_error_is_in_the_log(self, call, record, engine, tmp_path, capsys):
        record(f"{GPU}GPU-x", Image=engine.image_id)
        log = tmp_path / "log.json"
        log.write_text('{"level": "debug"}\n')
        with pytest.raises(SystemExit) as ended:
            call("--log", str(log), "create", "--bundle", str(tmp_path), "c1")
        assert ended.value.code == 1
        _, line = map(json.loads, log.read_text().splitlines())
        assert line["level"] == "error"
        assert line["msg"].startswith("imagematrix: Swarm assigned GPU-x, which this node does not have")
        assert capsys.readouterr().err.startswith("imagematrix: Swarm assigned GPU-x")

    def test_an_unexpected_error_is_in_the_log(self, call, monkeypatch, capsys):
        monkeypatch.setattr(runtime, "give_gpus", lambda *_: 1 // 0)
        with pytest.raises(SystemExit):
            call("create", "c1")
        assert capsys.readouterr().err.startswith("imagematrix: unexpected ZeroDivisionError: ")
