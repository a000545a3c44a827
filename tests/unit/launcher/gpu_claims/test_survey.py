"""Usage of the GPUs: processes listed by NVML, processes with an open node, containers and leases."""

import os
import subprocess
from pathlib import Path

import pytest

from imagematrix.common.record import replace
from imagematrix.hardware.host import accelerator_hints, nvml
from imagematrix.hardware.host.accelerator_hints import AcceleratorHints
from imagematrix.hardware.host.nvml import Nvml, NvmlGpu, Process
from imagematrix.images.engine.containers import PassedDevices, RunningContainer
from imagematrix.launcher.gpu_claims import processes, survey
from imagematrix.launcher.gpu_claims.usage import (
    Consumer,
    Usage,
    find_consumers,
    has_overlap,
    list_lock_names,
    merge_usages,
)

ME = os.getpid()


def nvml_of(**facts):
    return Nvml(gpus=(NvmlGpu(index=0, **({"minor": 10} | facts)),))


@pytest.fixture
def opener():
    """A process that alone has a device open."""
    with Path("/dev/full").open("rb") as device:
        process = subprocess.Popen(["sleep", "60"], stdin=device)
    with process:
        yield process
        process.kill()


def test_processes_that_compute():
    usage, covered = processes.compute_process_usage(
        nvml_of(processes=(Process(pid=ME), Process(pid=ME, gpu_instance=2, compute_instance=0)))
    )
    assert set(usage) == {"nvidia10", "nvidia10-gi2-ci0"}
    (process,) = usage["nvidia10"]
    assert (process.kind, process.pid) == ("process", ME)
    assert process.name == Path("/proc/self/comm").read_text().strip()
    assert process.user
    assert covered == {10}


@pytest.mark.parametrize("facts", [{"processes": None}, {"minor": None, "processes": (Process(pid=1),)}])
def test_gpus_that_nvml_does_not_cover(facts):
    assert processes.compute_process_usage(nvml_of(**facts)) == ({}, frozenset())


def test_an_ended_process_is_described_as_far_as_possible(tmp_path):
    assert str(processes.describe_process(7, str(tmp_path))) == "process unknown (pid 7)"
    (tmp_path / "7").mkdir()
    (tmp_path / "7/comm").write_text("train\n")
    try:
        os.chown(tmp_path / "7", 54321, 54321)
    except PermissionError:
        pytest.skip("only root can change the owner")
    assert str(processes.describe_process(7, str(tmp_path))) == "process train (pid 7, 54321)"


def test_processes_with_an_open_node(opener):
    number = Path("/dev/full").stat().st_rdev
    usage = processes.compute_open_device_usage({number: "nvidia10"})
    assert opener.pid in {process.pid for process in usage["nvidia10"]}
    assert ME not in {process.pid for process in usage["nvidia10"]}
    assert processes.compute_open_device_usage({os.makedev(511, 77): "nvidia10"}) == {}
    assert processes.compute_open_node_usage([250]) == {}


def test_monitoring_processes_do_not_count(tmp_path):
    for pid, name in (("7", "nvidia-persiste"), ("8", "train")):
        (tmp_path / pid / "fd").mkdir(parents=True)
        (tmp_path / pid / "fd/3").symlink_to("/dev/full")
        (tmp_path / pid / "fd/4").symlink_to("/nowhere")
        (tmp_path / pid / "comm").write_text(f"{name}\n")
    (tmp_path / "9").mkdir()
    (tmp_path / "self").mkdir()
    usage = processes.compute_open_device_usage({Path("/dev/full").stat().st_rdev: "nvidia10"}, str(tmp_path))
    assert [process.pid for process in usage["nvidia10"]] == [8]


def test_a_survey_combines_all_sources(gpu):
    devices = PassedDevices(paths=("/dev/nvidia10",))
    container = RunningContainer(container_id="", name="web", image="x", devices=devices)
    usage = survey.survey_usage((gpu(0),), lambda: [container], lambda: nvml_of(processes=(Process(pid=ME),)))
    assert [consumer.kind for consumer in usage["nvidia10"]] == ["process", "container"]


def test_open_nodes_are_scanned_if_nvml_lists_no_processes(gpu, monkeypatch):
    scanned = []
    monkeypatch.setattr(
        processes,
        "compute_open_node_usage",
        lambda minors: scanned.append(set(minors)) or {"nvidia11": (Consumer(kind="process", name="x"),)},
    )
    both = (gpu(0), gpu(1), gpu(2, minor=None))
    usage = survey.survey_usage(both, list, lambda: nvml_of(processes=()))
    assert set(usage) == {"nvidia11"}
    survey.survey_usage(both, list, lambda: Nvml(error=18, message="mismatch"))
    assert scanned == [{11}, {10, 11}]
    assert survey.survey_usage(both, list, lambda: None) == {}  # no driver, no process
    survey.survey_usage(both[:1], list, lambda: nvml_of(processes=()))
    assert len(scanned) == 2


def test_nvml_is_queried_only_if_a_driver_is_loaded(monkeypatch):
    loaded = AcceleratorHints(modules=("nvidia",), nodes=(), tegra=False, functions={})
    monkeypatch.setattr(
        accelerator_hints, "find_hints", lambda _: replace(loaded, modules=("nvgpu",), nodes=("nvidiactl",))
    )
    assert survey.query_nvml() is None
    monkeypatch.setattr(accelerator_hints, "find_hints", lambda _: loaded)
    monkeypatch.setattr(nvml, "read_nvml", lambda: "reading")
    assert survey.query_nvml() == "reading"


def test_leases(locks):
    held = locks.take("nvidia10", "wait-000000001")
    usage = survey.compute_locked_usage(locks)
    assert {key: [(lease.kind, lease.pid) for lease in leases] for key, leases in usage.items()} == {
        "nvidia10": [("lease", ME)]
    }
    with locks.hold_mutex():
        assert (
            survey.compute_locked_usage(locks) == {}
        )  # a launch that is choosing holds more than it will get
    for descriptor in held:
        os.close(descriptor)
    assert survey.compute_locked_usage(locks) == {}


def test_keys(gpu):
    assert list_lock_names(gpu(3)) == ("nvidia13",)
    assert list_lock_names(gpu(3, mig=())) == ("nvidia13",)
    assert list_lock_names(gpu(3, mig=((1, 0), (1, 1)))) == ("nvidia13-gi1-ci0", "nvidia13-gi1-ci1")


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (["nvidia1"], ["nvidia1"], True),
        (["nvidia1"], ["nvidia10"], False),
        (["nvidia1"], ["nvidia1-gi1-ci0"], True),
        (["nvidia1-gi1-ci0"], ["nvidia1"], True),
        (["nvidia1-gi1-ci0"], ["nvidia1-gi2-ci0"], False),
        (["nvidia1-gi1-ci0"], ["nvidia1-gi1-ci01"], False),
        ([], ["nvidia1"], False),
        (["nvidia1", "nvidia2"], ["nvidia3", "nvidia2"], True),
    ],
)
def test_overlap(left, right, expected):
    assert has_overlap(left, right) is expected


def test_usage_is_combined_without_duplicates():
    web, job = Consumer(kind="container", name="web"), Consumer(kind="container", name="job")
    usage = merge_usages({"nvidia1": (web,)}, {"nvidia1": (web, job), "nvidia2": (job,)}, {})
    assert usage == {"nvidia1": (web, job), "nvidia2": (job,)}
    assert find_consumers(usage, ["nvidia1", "nvidia2"]) == (web, job)


class TestQuickly:
    """A survey that queries the driver only if containers do not explain an open device."""

    @pytest.fixture
    def opened(self, monkeypatch):
        """Return a function that simulates processes with these marks that have nvidia10 open."""

        def have(*marks):
            openers = tuple(Consumer(kind="process", name="train", owner_ids=frozenset(own)) for own in marks)
            usage = {"nvidia10": openers} if openers else {}
            monkeypatch.setattr(
                processes, "compute_open_node_usage", lambda minors: usage if minors == {10} else {}
            )

        return have

    @staticmethod
    def survey(gpu, **given):
        usage: Usage = {
            key: (Consumer(kind="container", name=name, owner_ids=frozenset({name})),)
            for key, name in given.items()
        }
        asked: Usage = {"asked": ()}
        return survey.survey_quickly((gpu(), replace(gpu(1), minor=None)), lambda: usage, lambda: asked)

    def test_no_process_has_a_gpu_open(self, opened, gpu):
        opened()
        assert self.survey(gpu) == {}

    def test_only_containers_with_the_gpu_have_it_open(self, opened, gpu):
        opened({"c1"}, {"c1", "c0"})
        assert list(self.survey(gpu, nvidia10="c1")) == ["nvidia10"]

    def test_a_container_with_a_part_of_the_gpu(self, opened, gpu):
        opened({"c1"}, {"c2"})
        usage = {"nvidia10-gi1-ci0": "c1", "nvidia10-gi2-ci0": "c2"}
        assert set(self.survey(gpu, **usage)) == usage.keys()

    @pytest.mark.parametrize("marks", [set(), {"c2"}])
    def test_a_process_without_the_gpu_needs_the_whole_survey(self, opened, gpu, marks):
        opened({"c1"}, marks)
        assert self.survey(gpu, nvidia10="c1") == {"asked": ()}
        assert self.survey(gpu, nvidia11="c1") == {"asked": ()}
