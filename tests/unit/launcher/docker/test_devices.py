"""Which device nodes a container gets, and the messages about those that cannot be used."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from imagematrix.errors import ProbeError
from imagematrix.launcher.docker.devices import (
    DevicesError,
    check_device_nodes,
    list_device_nodes,
    require_device_nodes,
)

# The driver's format: 15 GPU instances of 8 compute instances each for every GPU.
NULL = os.makedev(1, 3)
NOTHING = os.makedev(511, 77)  # no driver registers it
mknod = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")


@pytest.fixture
def node(tmp_path):
    """Return a function that creates character devices in a separate tree."""

    def make(path, device=NULL, mode=0o666):
        target = tmp_path / path.removeprefix("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.mknod(target, stat.S_IFCHR | mode, device)
            with target.open("rb"):
                pass
        except PermissionError:
            pytest.skip("this machine lets nobody use device nodes here")
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.ENODEV):
                raise
        return path

    return make


def test_nodes_are_named_by_minor_not_by_index(make):
    one, two = make.gpu(0, minor=3), make.gpu(1, minor=0)
    assert list_device_nodes(make.host(one, two), (one, two)) == (
        "/dev/nvidia3",
        "/dev/nvidia0",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
    )


def test_no_gpu_no_nodes(make):
    assert list_device_nodes(make.host(devices=("/dev/nvidia-modeset",)), ()) == ()


def test_optional_nodes_are_passed_if_present(make):
    present = ("/dev/nvidia-modeset", "/dev/nvidia-uvm-tools", "/dev/nvidia0", "/dev/nvidia3")
    host = make.host(make.gpu(), devices=present)
    assert list_device_nodes(host, host.gpus)[3:] == ("/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
    host = make.host(make.gpu(), devices=("/dev/nvidia-modeset",))
    assert list_device_nodes(host, host.gpus)[3:] == ("/dev/nvidia-modeset",)


def test_an_unknown_minor_is_refused(make):
    host = make.host(make.gpu(minor=None))
    with pytest.raises(ProbeError, match="GPU 0"):
        list_device_nodes(host, host.gpus)


def test_mig_devices_add_their_capabilities(make):
    gpu = make.gpu(0, mig=(make.mig(1, capabilities=(417, 418)), make.mig(2, capabilities=(426, 427))))
    result = list_device_nodes(make.host(gpu), (gpu,))
    assert result == (
        "/dev/nvidia3",
        "/dev/nvidia-caps/nvidia-cap417",
        "/dev/nvidia-caps/nvidia-cap418",
        "/dev/nvidia-caps/nvidia-cap426",
        "/dev/nvidia-caps/nvidia-cap427",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
    )


def test_compute_instances_of_one_gpu_instance_share_its_node(make):
    mig = (make.mig(1, 0, capabilities=(12, 13)), make.mig(1, 1, capabilities=(12, 14)))
    gpu = make.gpu(0, minor=0, mig=mig)
    result = list_device_nodes(make.host(gpu), (gpu,))
    assert [path.rpartition("cap")[2] for path in result if "cap" in path] == ["12", "13", "14"]


def test_an_unknown_capability_is_refused(make):
    gpu = make.gpu(0, minor=0, mig=(make.mig(1, capabilities=(12, 13)), make.mig(9)))
    with pytest.raises(ProbeError, match=r"did not find /proc/driver/nvidia/capabilities/gpu0/mig/gi9$"):
        list_device_nodes(make.host(gpu), (gpu,))


def test_working_nodes_have_no_problem():
    assert check_device_nodes(["/dev/null", "/dev/zero"]) == ()
    require_device_nodes(["/dev/null"])


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/dev/nvidia3", "nvidia-modprobe -c 3"),
        ("/dev/nvidiactl", "modprobe nvidia"),
        ("/dev/nvidia-uvm", "nvidia-modprobe -u"),
        ("/dev/nvidia-uvm-tools", "nvidia-modprobe -u"),
        ("/dev/nvidia-modeset", "nvidia-modprobe -m"),
        ("/dev/nvidia-caps/nvidia-cap12", "nvidia-modprobe -f"),
    ],
)
def test_the_remedy_of_a_missing_node_creates_it(tmp_path, path, remedy):
    (problem,) = check_device_nodes([path], str(tmp_path))
    assert (problem.path, problem.what) == (path, "not found")
    assert remedy in problem.remedy


def test_a_regular_file_is_refused(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    (problem,) = check_device_nodes(["/dev/nvidiactl"], f"{tmp_path}/")
    assert problem.what == "not a character device"
    (problem,) = check_device_nodes(["/dev/nvidiactl/x"], str(tmp_path))
    assert problem.what == "not found"


@mknod
def test_real_nodes(node, tmp_path):
    assert check_device_nodes([node("/dev/nvidia0")], str(tmp_path)) == ()
    (problem,) = check_device_nodes([node("/dev/nvidia1", NOTHING)], str(tmp_path))
    assert problem.what == "no driver attached"
    assert "modprobe nvidia" in problem.remedy


@mknod
def test_a_node_without_permission(node, tmp_path, monkeypatch):
    node("/dev/nvidia0", mode=0o600)
    node("/dev/nvidia-caps/nvidia-cap12", mode=0o444)  # capabilities are only ever read
    (tmp_path / "dev/nvidia1").symlink_to("/dev/null")
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # the parent folders are private to their owner
    os.seteuid(65534)
    try:
        problems = check_device_nodes(["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap12"], ".")
    finally:
        os.seteuid(0)
    assert [(problem.path, problem.what) for problem in problems] == [("/dev/nvidia0", "permission denied")]
    assert "udev" in problems[0].remedy


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EACCES, "permission denied"),
        (errno.ENXIO, "no driver attached"),
        (errno.ENOENT, "not found"),
        (errno.EIO, "cannot open: Input/output error"),
    ],
)
def test_errors_of_the_kernel(monkeypatch, number, words):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    (problem,) = check_device_nodes(["/dev/null"])
    assert problem.what == words


def test_the_error_lists_every_problem(tmp_path):
    with pytest.raises(DevicesError) as caught:
        require_device_nodes(["/dev/nvidia0", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"], str(tmp_path))
    error = caught.value
    assert str(error) == (
        "/dev/nvidia0: not found; /dev/nvidia-uvm: not found; /dev/nvidia-uvm-tools: not found"
    )
    assert error.remedy.count("nvidia-modprobe -u") == 1
    assert error.problems[0].path == "/dev/nvidia0"
    assert error.exit_code == 5


def test_a_node_denied_to_this_user_is_a_doubt(monkeypatch):
    """The engine opens it for the container, as root."""

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(DevicesError):  # not the mode denies root
        require_device_nodes(["/dev/null"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (doubt,) = require_device_nodes(["/dev/null"])
    assert (doubt.path, doubt.what, doubt.doubt) == ("/dev/null", "permission denied", True)
    with pytest.raises(DevicesError, match="/dev/nvidia199: not found"):
        require_device_nodes(["/dev/null", "/dev/nvidia199"])
