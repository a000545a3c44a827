"""The usage of GPUs outside of pods, as the device plugin reads it."""

import os

import pytest

from imagematrix.errors import EngineError
from imagematrix.images.engine.containers import PassedDevices, RunningContainer
from imagematrix.launcher.gpu_claims import processes, survey
from imagematrix.launcher.gpu_claims.usage import Consumer

POD = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-containerd-ab.scope"


@pytest.fixture
def proc(tmp_path):
    """Return a function that adds a process with /dev/nvidia10 open to a folder like /proc."""

    def add(pid, cgroup):
        folder = tmp_path / "proc" / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "fd/3").symlink_to("/dev/full")
        (folder / "comm").write_text("train\n")
        (folder / "cgroup").write_text(cgroup and f"5:devices:{cgroup}\n")

    return add


@pytest.fixture
def nodes(monkeypatch):
    """Let /dev/full be the node of the GPU with the minor 10."""
    number = os.stat("/dev/full").st_rdev  # noqa: PTH116 - as in the module
    monkeypatch.setattr(processes, "MAJOR", os.major(number))
    monkeypatch.setattr(os, "makedev", lambda *_: number)


@pytest.mark.parametrize(
    ("cgroup", "counts"),
    [
        (POD, False),
        ("/kubepods/besteffort/pod1/ab", False),
        ("/system.slice/kubepods/pod1/ab", False),  # kubelet's --cgroup-root
        ("/system.slice/ssh.service", True),
        ("/docker/ab", True),
        ("/", True),
        ("", True),
        ("/my-kubepods/x", True),
        ("/user.slice/user-1000.slice/user@1000.service/kubepods.slice/x.scope", True),
    ],
)
@pytest.mark.usefixtures("nodes")
def test_processes_of_pods_do_not_count(proc, tmp_path, gpu, cgroup, counts):
    proc(7, cgroup)
    used = survey.survey_open_outside_pods((gpu(0),), str(tmp_path))
    assert {key: [one.pid for one in using] for key, using in used.items()} == (
        {"nvidia10": [7]} if counts else {}
    )


@pytest.fixture
def node(monkeypatch, tmp_path):
    """A node without leases, processes and containers; a test sets what it has."""
    monkeypatch.setenv("IMAGEMATRIX_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    monkeypatch.setattr(processes, "compute_open_node_usage", lambda *_: {})
    monkeypatch.setattr(survey, "query_nvml", lambda: pytest.fail("asked NVML"))
    return tmp_path


def container(name, parent=""):
    devices = PassedDevices(paths=("/dev/nvidia10",))
    return RunningContainer(container_id="", name=name, image="x", devices=devices, cgroup_parent=parent)


def test_a_node_without_an_engine_and_without_leases(node, gpu):
    assert survey.survey_outside_pods((gpu(0),)) == {}
    assert not (node / "locks").exists()


def test_an_engine_that_does_not_answer_is_an_error(node, gpu):
    (node / "docker.sock").touch()
    with pytest.raises(EngineError):
        survey.survey_outside_pods((gpu(0),))


def test_containers_of_an_engine_count_and_those_of_pods_do_not(node, gpu, monkeypatch):
    (node / "docker.sock").touch()
    running = [container("train"), container("k8s_main", "/kubepods/burstable/pod1")]
    running.append(container("k8s_other", "kubepods-burstable-pod2.slice"))
    monkeypatch.setattr("imagematrix.images.engine.containers.list_running_or_starting", lambda *_: running)
    used = survey.survey_outside_pods((gpu(0),))
    assert {key: [one.name for one in using] for key, using in used.items()} == {"nvidia10": ["train (x)"]}


def test_leases_count(node, gpu, locks, monkeypatch):
    monkeypatch.setenv("IMAGEMATRIX_LOCKS", locks.path)
    held = locks.take("nvidia10")
    try:
        used = survey.survey_outside_pods((gpu(0),))
    finally:
        for descriptor in held:
            os.close(descriptor)
    assert [one.kind for one in used["nvidia10"]] == ["lease"]
    assert node


def test_nvml_is_asked_if_a_process_outside_of_pods_has_a_gpu_open(node, gpu, monkeypatch):
    idle = Consumer(kind="process", name="Xorg", pid=7)
    monkeypatch.setattr(processes, "compute_open_node_usage", lambda *_: {"nvidia10": (idle,)})
    monkeypatch.setattr(survey, "query_nvml", lambda: None)  # no process computes
    assert survey.survey_outside_pods((gpu(0),)) == {}
    assert node
