"""Who uses the GPUs: processes that NVML names, those that have a node open, containers and leases."""

import os
import subprocess
from pathlib import Path

import pytest

from imagematrix.allocation import processes, survey
from imagematrix.allocation.usage import Use, joined, keys, overlap, users
from imagematrix.node import nvml, signs
from imagematrix.node.nvml import Nvml, NvmlGpu, Process
from imagematrix.node.signs import Signs
from imagematrix.record import replace

ME = os.getpid()


def answer(**facts):
    return Nvml(gpus=(NvmlGpu(index=0, **({"minor": 10} | facts)),))


@pytest.fixture
def opener():
    """A process that has a device open that nothing else here has."""
    with Path("/dev/full").open("rb") as device:
        process = subprocess.Popen(["sleep", "60"], stdin=device)
    with process:
        yield process
        process.kill()


def test_processes_that_compute():
    found, told = processes.computing(
        answer(processes=(Process(pid=ME), Process(pid=ME, gpu_instance=2, compute_instance=0)))
    )
    assert set(found) == {"nvidia10", "nvidia10-gi2-ci0"}
    (use,) = found["nvidia10"]
    assert (use.kind, use.pid) == ("process", ME)
    assert use.name == Path("/proc/self/comm").read_text().strip()
    assert use.user
    assert told == {10}


@pytest.mark.parametrize("facts", [{"processes": None}, {"minor": None, "processes": (Process(pid=1),)}])
def test_what_nvml_does_not_tell_is_not_told(facts):
    assert processes.computing(answer(**facts)) == ({}, frozenset())


def test_a_process_that_has_ended_is_named_as_far_as_possible(tmp_path):
    assert str(processes.describe(7, str(tmp_path))) == "process unknown (pid 7)"
    (tmp_path / "7").mkdir()
    (tmp_path / "7/comm").write_text("train\n")
    try:
        os.chown(tmp_path / "7", 54321, 54321)
    except PermissionError:
        pytest.skip("only root can play somebody else")
    assert str(processes.describe(7, str(tmp_path))) == "process train (pid 7, 54321)"


def test_who_has_a_node_open(opener):
    number = Path("/dev/full").stat().st_rdev
    found = processes.held_open({number: "nvidia10"})
    assert opener.pid in {use.pid for use in found["nvidia10"]}
    assert ME not in {use.pid for use in found["nvidia10"]}
    assert processes.held_open({os.makedev(511, 77): "nvidia10"}) == {}
    assert processes.opened([250]) == {}


def test_who_only_watches_uses_nothing(tmp_path):
    for pid, name in (("7", "nvidia-persiste"), ("8", "train")):
        (tmp_path / pid / "fd").mkdir(parents=True)
        (tmp_path / pid / "fd/3").symlink_to("/dev/full")
        (tmp_path / pid / "fd/4").symlink_to("/nowhere")
        (tmp_path / pid / "comm").write_text(f"{name}\n")
    (tmp_path / "9").mkdir()
    (tmp_path / "self").mkdir()
    found = processes.held_open({Path("/dev/full").stat().st_rdev: "nvidia10"}, str(tmp_path))
    assert [use.pid for use in found["nvidia10"]] == [8]


def test_all_sources_are_joined(gpu):
    container = {
        "Name": "/web",
        "Config": {"Image": "x"},
        "HostConfig": {"Devices": [{"PathOnHost": "/dev/nvidia10"}]},
    }
    found = survey.survey((gpu(0),), lambda: [container], lambda: answer(processes=(Process(pid=ME),)))
    assert [use.kind for use in found["nvidia10"]] == ["process", "container"]


def test_nodes_are_looked_at_where_nvml_says_nothing(gpu, monkeypatch):
    asked = []
    monkeypatch.setattr(
        processes,
        "opened",
        lambda minors: asked.append(set(minors)) or {"nvidia11": (Use(kind="process", name="x"),)},
    )
    both = (gpu(0), gpu(1), gpu(2, minor=None))
    found = survey.survey(both, list, lambda: answer(processes=()))
    assert set(found) == {"nvidia11"}
    survey.survey(both, list, lambda: Nvml(error=18, message="mismatch"))
    assert asked == [{11}, {10, 11}]
    assert survey.survey(both, list, lambda: None) == {}  # no driver, no process
    survey.survey(both[:1], list, lambda: answer(processes=()))
    assert len(asked) == 2


def test_nvml_is_asked_only_where_something_shows_a_driver(monkeypatch):
    shows = Signs(modules=("nvidia",), nodes=(), tegra=False, functions={})
    monkeypatch.setattr(signs, "look", lambda _: replace(shows, modules=("nvgpu",), nodes=("nvidiactl",)))
    assert survey.ask_nvml() is None
    monkeypatch.setattr(signs, "look", lambda _: shows)
    monkeypatch.setattr(nvml, "read", lambda: "asked")
    assert survey.ask_nvml() == "asked"


def test_leases(locks):
    held = locks.take("nvidia10", "wait-000000001")
    found = survey.leases(locks)
    assert {key: [(use.kind, use.pid) for use in uses] for key, uses in found.items()} == {
        "nvidia10": [("lease", ME)]
    }
    with locks.turn():
        assert survey.leases(locks) == {}  # who is choosing holds more than it will get
    for descriptor in held:
        os.close(descriptor)
    assert survey.leases(locks) == {}


def test_keys(gpu):
    assert keys(gpu(3)) == ("nvidia13",)
    assert keys(gpu(3, mig=())) == ("nvidia13",)
    assert keys(gpu(3, mig=((1, 0), (1, 1)))) == ("nvidia13-gi1-ci0", "nvidia13-gi1-ci1")


@pytest.mark.parametrize(
    ("some", "others", "together"),
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
def test_overlap(some, others, together):
    assert overlap(some, others) is together


def test_uses_are_joined_without_repeating():
    web, job = Use(kind="container", name="web"), Use(kind="container", name="job")
    found = joined({"nvidia1": (web,)}, {"nvidia1": (web, job), "nvidia2": (job,)}, {})
    assert found == {"nvidia1": (web, job), "nvidia2": (job,)}
    assert users(found, ["nvidia1", "nvidia2"]) == (web, job)
