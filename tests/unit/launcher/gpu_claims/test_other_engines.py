"""Containers of other engines, found by their processes in a simulated /proc."""

import os
import stat

import pytest

from imagematrix.launcher.gpu_claims import other_engines as module
from imagematrix.launcher.gpu_claims.containers import compute_container_usage
from imagematrix.launcher.gpu_claims.other_engines import find_other_containers
from imagematrix.launcher.gpu_claims.survey import drop_listed

WEB, JOB, POD = (letter * 64 for letter in "abc")
ALL = "000001ffffffffff"
SOME = "00000000a80425fb"


@pytest.fixture
def proc(tmp_path):
    """A /proc of processes that see the machine's /dev: this one, a daemon, and one that cannot be read."""
    machine = tmp_path / "machine" / "dev"
    machine.mkdir(parents=True)
    for pid, cgroup in (
        ("self", "/"),
        ("1", "/init"),
        ("7", "/system.slice/web.service"),
        ("8", f"/docker/{JOB}"),
    ):
        folder = tmp_path / "proc" / pid
        folder.mkdir(parents=True)
        (folder / "root").symlink_to(machine.parent)
        (folder / "cgroup").write_text(f"0::{cgroup}\n")
    (tmp_path / "proc" / "1" / "status").write_text(f"CapBnd:\t{ALL}\n")
    (tmp_path / "proc" / "9").mkdir()
    (tmp_path / "proc" / "uptime").touch()
    return tmp_path / "proc"


@pytest.fixture
def start(proc, tmp_path):
    """Call it with a process, its cgroup and the names and numbers of nodes to add it to /proc."""

    def add(pid, cgroup, nodes=(), bounding=SOME, root=None, mounts=()):
        folder = proc / str(pid)
        folder.mkdir()
        (folder / "cgroup").write_text(f"12:devices:{cgroup}\n0::{cgroup}\n")
        (folder / "comm").write_text("train\n")
        (folder / "status").write_text(f"Name:\ttrain\nCapBnd:\t{bounding}\n")
        (folder / "mountinfo").write_text("".join(f"{line}\n" for line in mounts))
        if mounts:
            return
        dev = tmp_path / (root or f"root-{pid}") / "dev"
        if not dev.exists():
            (dev / "nvidia-caps").mkdir(parents=True)
            for name, major, minor in nodes:
                os.mknod(dev / name, stat.S_IFCHR, os.makedev(major, minor))
        (folder / "root").symlink_to(dev.parent)

    return add


def found(proc, gpus, *listed, by_kubelet=()):
    described = find_other_containers(gpus, lambda: listed, proc=str(proc))
    described = drop_listed(described, dict.fromkeys(by_kubelet, ()), gpus)
    return {
        key: [one.name for one in using] for key, using in compute_container_usage(described, gpus).items()
    }


needs_nodes = pytest.mark.skipif(os.geteuid() != 0, reason="only root can create device nodes")


@needs_nodes
def test_a_container_of_another_engine_has_the_gpus_whose_nodes_it_has(proc, start, gpu):
    gpus = (gpu(0), gpu(1), gpu(2))
    start(20, f"/machine.slice/libpod-{WEB}.scope", [("null", 1, 3), ("x", 195, 11), ("nvidiactl", 195, 255)])
    start(21, f"/machine.slice/libpod-{WEB}.scope", root="root-20")
    name = f"{WEB[:12]} (train, pid 20, of another engine)"
    assert found(proc, gpus) == {"nvidia11": [name]}
    assert found(proc, gpus, JOB) == {"nvidia11": [name]}
    assert found(proc, gpus, WEB) == {}  # the engine knows it, and lists it as it is
    assert found(proc, (gpu(0, minor=None),)) == {}


@needs_nodes
def test_containers_that_do_not_count(proc, start, gpu):
    gpus = (gpu(0), gpu(1))
    nodes = [("nvidia10", 195, 10), ("nvidia11", 195, 11)]
    machine = proc / "self" / "root" / "dev"
    for name, major, minor in nodes:
        os.mknod(machine / name, stat.S_IFCHR, os.makedev(major, minor))
    start(20, "/user.slice/session.scope", nodes)  # a sandbox of a desktop
    start(21, f"/kubepods/pod1/{POD}", nodes)
    start(22, f"/docker/{WEB}", nodes, bounding=ALL)  # privileged
    start(23, f"/docker/{JOB}", [("nvidia10", 10, 10), ("loop", 7, 10)])
    assert found(proc, gpus, by_kubelet=("nvidia10", "nvidia11")) == {}
    # The kubelet lists no GPU that a pod has by a claim, or by a variable for NVIDIA's runtime.
    for listed in ((), ("nvidia10",)):
        assert list(found(proc, gpus, by_kubelet=listed)) == ["nvidia10", "nvidia11"]
    (proc / "21").rename(proc / "gone")
    os.mknod(machine / "nvidia12", stat.S_IFCHR, os.makedev(195, 12))
    # With every capability, but only some of the nodes, it is not privileged.
    assert list(found(proc, gpus)) == ["nvidia10", "nvidia11"]


@needs_nodes
def test_a_mig_device_is_counted_by_its_nodes(proc, start, gpu):
    gpus = (gpu(0, mig=((1, 0), (2, 0))),)
    nodes = [
        ("nvidia10", 195, 10),
        ("nvidia-caps/nvidia-cap20", 240, 20),
        ("nvidia-caps/nvidia-cap21", 240, 21),
    ]
    start(20, f"/docker/{WEB}", nodes)
    assert list(found(proc, gpus)) == ["nvidia10-gi2-ci0"]


def test_nodes_that_are_mounted_count_for_users_who_see_no_more(proc, start, gpu):
    """In a user namespace, as for rootless podman, no node can be created."""
    mounts = [
        "610 600 0:5 /nvidia11 /dev/nvidia11 rw,nosuid - devtmpfs udev rw",
        "611 600 0:5 /null /dev/null rw,nosuid - devtmpfs udev rw",
        "612 600 8:1 /nvidia10 /mnt/nvidia10 rw - ext4 /dev/sda1 rw",
        "613",
    ]
    start(20, f"/user.slice/libpod-{WEB}.scope", mounts=mounts)
    assert list(found(proc, (gpu(0), gpu(1)))) == ["nvidia11"]
    (proc / "20" / "mountinfo").unlink()
    assert found(proc, (gpu(0), gpu(1))) == {}


def test_a_container_that_ended_meanwhile_is_left_out(proc, start, gpu):
    start(20, f"/docker/{WEB}", mounts=["610 600 0:5 /nvidia10 /dev/nvidia10 rw - devtmpfs udev rw"])

    def listed():
        (proc / "20").rename(proc / "gone")
        return ()

    assert find_other_containers((gpu(0),), listed, proc=str(proc)) == []


def test_the_engine_is_not_asked_without_such_containers(proc, gpu):
    assert find_other_containers((gpu(0),), pytest.fail, proc=str(proc)) == []


def test_this_machine_s_processes_are_read(gpu):
    # Other containers may run on this machine with nodes of their own, but none has a node of this number.
    running = find_other_containers((gpu(0, minor=240),), tuple)
    assert "/dev/nvidia240" not in [path for container in running for path in container.devices.paths]
    assert module.ENTRIES > 1000
