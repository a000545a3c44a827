"""The GPUs that the user's own options for docker pass, which are claimed like all others."""

from __future__ import annotations

import os
from typing import Any

import pytest

from imagematrix.common.record import replace
from imagematrix.errors import GpusBusyError, UsageError
from imagematrix.launcher.daemonless.options import parse_container_options
from imagematrix.launcher.docker import request as module
from imagematrix.launcher.docker.options import parse_run_args
from imagematrix.launcher.docker.request import make_request
from imagematrix.launcher.docker.user_gpu_options import (
    find_gpus_in_api_options,
    find_user_gpus,
    list_mounted,
)
from imagematrix.launcher.gpu_claims.usage import Consumer, list_lock_names

CAPABILITY = "/dev/nvidia-caps/nvidia-cap"
WEB = Consumer(kind="container", name="web")
EVERY = ["nvidia3", "nvidia4", "nvidia5-gi1-ci0", "nvidia5-gi2-ci0"]


@pytest.fixture
def gpus(make):
    """GPUs with the minors 3, 4 and 5, the last in MIG mode."""
    parts = tuple(
        make.mig(number, uuid=f"MIG-{number}", capabilities=(10 * number, 10 * number + 1))
        for number in (1, 2)
    )
    return (make.gpu(0), make.gpu(1), make.gpu(2, mig=parts))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--rm IMAGE --device /dev/nvidia3", []),
        ("--device /dev/nvidia3 IMAGE", ["nvidia3"]),
        ("--device=/dev/nvidia4:/dev/x:rwm --device /dev/fuse IMAGE", ["nvidia4"]),
        ("--device /dev/nvidia3 --device /dev/nvidia4 IMAGE", ["nvidia3", "nvidia4"]),
        ("--device /dev/nvidia7 IMAGE", ["nvidia7"]),  # also a GPU that the probe did not find
        ("--device /dev/nvidia5 IMAGE", ["nvidia5-gi1-ci0", "nvidia5-gi2-ci0"]),
        (
            f"--device /dev/nvidia5 --device {CAPABILITY}20 --device {CAPABILITY}21 IMAGE",
            ["nvidia5-gi2-ci0"],
        ),
        ("--device nvidia.com/gpu=1 IMAGE", ["nvidia4"]),
        ("--device nvidia.com/gpu=GPU-0 IMAGE", ["nvidia3"]),
        (
            "--device imagematrix.io/gpu=1 --device imagematrix.io/gpu=2:1:0 IMAGE",
            ["nvidia4", "nvidia5-gi1-ci0"],
        ),
        ("--device management.nvidia.com/gpu=0 IMAGE", ["nvidia3"]),
        ("--device nvidia.com/gpu=all IMAGE", EVERY),
        ("--device /dev IMAGE", EVERY),
        ("--privileged IMAGE", EVERY),
        ("--privileged=false IMAGE", []),
        ("-v /dev:/dev IMAGE", []),
        (["--device-cgroup-rule", "c 195:4 rw", "IMAGE"], ["nvidia4"]),
        (["--device-cgroup-rule=c 195:* rwm", "IMAGE"], EVERY),
        (["--device-cgroup-rule=c 10:* rwm", "IMAGE"], []),
        ("-e NVIDIA_VISIBLE_DEVICES=1 IMAGE", ["nvidia4"]),
        ("-e NVIDIA_VISIBLE_DEVICES IMAGE", ["nvidia3"]),
        ("-e NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=1 IMAGE", ["nvidia4"]),
        ("-e NVIDIA_VISIBLE_DEVICES=1 --runtime runc IMAGE", []),
        ("-e NVIDIA_VISIBLE_DEVICES=1 --runtime gpu IMAGE", ["nvidia4"]),
        ("-e NVIDIA_VISIBLE_DEVICES=1 --runtime other IMAGE", []),
        ("--device //dev IMAGE", EVERY),
        (["--device-cgroup-rule", "a *:* rwm", "IMAGE"], EVERY),
    ],
)
def test_gpus_that_docker_s_options_pass(gpus, monkeypatch, line, expected):
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "0")
    words = parse_run_args(line.split() if isinstance(line, str) else line)
    runtimes = {"gpu": {"path": "/usr/bin/nvidia-container-runtime"}, "other": {"path": "/usr/bin/runsc"}}
    result = find_user_gpus(words, gpus, lambda: {"DefaultRuntime": "nvidia", "Runtimes": runtimes})
    assert sorted(key for gpu in result.gpus for key in list_lock_names(gpu)) == expected
    assert result.names_all == (bool(expected) and not words.is_privileged)


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("NVIDIA_VISIBLE_DEVICES=1\n", "--env-file {} IMAGE", ["nvidia4"]),
        ("\ufeff# comment\n\n  NVIDIA_VISIBLE_DEVICES=1\nX=1\n", "--env-file={} IMAGE", ["nvidia4"]),
        ("NVIDIA_VISIBLE_DEVICES\n", "--env-file {} IMAGE", ["nvidia3"]),
        ("#NVIDIA_VISIBLE_DEVICES=1\nCUDA_VISIBLE_DEVICES=1\n", "--env-file {} IMAGE", []),
        ("NVIDIA_VISIBLE_DEVICES=1\n", "-e NVIDIA_VISIBLE_DEVICES=0 --env-file {} IMAGE", ["nvidia3"]),
        ("NVIDIA_VISIBLE_DEVICES=1\n", "--env-file {} --runtime runc IMAGE", []),
        ("NVIDIA_VISIBLE_DEVICES=1\n", "--env-file {}.none IMAGE", []),  # which docker reports
    ],
)
def test_gpus_that_an_env_file_names(gpus, monkeypatch, tmp_path, text, line, expected):
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "0")
    path = tmp_path / "env"
    path.write_text(text, encoding="utf-8")
    result = find_user_gpus(
        parse_run_args(line.format(path).split()), gpus, lambda: {"DefaultRuntime": "nvidia"}
    )
    assert [key for gpu in result.gpus for key in list_lock_names(gpu)] == expected
    assert result.names_all == bool(expected)


def test_an_env_file_that_can_be_read_only_once_is_left_to_docker(gpus, tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    words = parse_run_args(["--env-file", str(path), "IMAGE"])
    assert find_user_gpus(words, gpus, dict).gpus == ()
    with pytest.raises(UsageError, match="not a regular file"):
        find_user_gpus(words, gpus, lambda: {"DefaultRuntime": "nvidia"})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-v /dev/nvidia3:/dev/nvidia3 IMAGE", ["nvidia3"]),
        ("--volume /dev:/x:ro IMAGE", EVERY),
        ("-v /:/host IMAGE", EVERY),
        ("--mount type=bind,source=/dev/nvidia4,target=/y IMAGE", ["nvidia4"]),
        ("--mount type=bind,src={}/link,dst=/y IMAGE", EVERY),
        ('--mount type=bind,"source={}/a,b",target=/y IMAGE', EVERY),
        ("-v ./link:/y IMAGE", EVERY),
        ("-v {}/other:/y IMAGE", ["nvidia3"]),
        ("-v /dev/shm:/dev/shm -v data:/data -v {}:/tmp IMAGE", []),
    ],
)
def test_volumes_pass_gpus_where_no_root_s_daemon_keeps_them_closed(
    gpus, monkeypatch, tmp_path, line, expected
):
    for name in ("link", "a,b"):
        (tmp_path / name).symlink_to("/dev")
    # A node with another name: it has the number of /dev/null, whose minor is 3.
    (tmp_path / "other").symlink_to("/dev/null")
    monkeypatch.setattr("imagematrix.launcher.gpu_claims.containers.MAJOR", 1)
    monkeypatch.chdir(tmp_path)
    words = parse_run_args(line.format(tmp_path).split())
    mounted = [*list_mounted(words)]
    rootless = {"SecurityOptions": ["name=seccomp,profile=builtin", "name=rootless"]}
    for info, without_daemon in ((pytest.fail, True), (lambda: rootless, False)):
        passed = find_user_gpus(words, gpus, info, mounted, without_daemon=without_daemon).gpus
        assert sorted(key for gpu in passed for key in list_lock_names(gpu)) == expected
    answers: list[dict[str, Any]] = [{}, {"SecurityOptions": None}, {"SecurityOptions": ["name=seccomp"]}]
    for answer in answers:
        assert find_user_gpus(words, gpus, answer.copy, mounted).gpus == ()


def test_a_folder_of_data_is_not_searched_for_nodes(gpus, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "walk", pytest.fail)
    words = parse_run_args(["IMAGE"])
    assert find_user_gpus(words, gpus, pytest.fail, [str(tmp_path)], without_daemon=True).gpus == ()


def test_what_options_mount_without_a_daemon_is_read_once(gpus, monkeypatch, tmp_path):
    """As by the parser of these options: it knows quotes, and the user's home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "l").symlink_to("/dev")
    for words in (["-v", "~/l:/h"], ["--mount", 'type=bind,"source=/dev",target=/h']):
        args = parse_run_args([*words, "IMAGE"])
        mounted = [bind.source for bind in parse_container_options(args, {}, "oci").binds]
        passed = find_user_gpus(args, gpus, pytest.fail, mounted, without_daemon=True).gpus
        assert sorted(key for gpu in passed for key in list_lock_names(gpu)) == EVERY


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"devices": ["/dev/nvidia4:/dev/x:rwm", "/dev/fuse"]}, ["nvidia4"]),
        ({"device_cgroup_rules": ["c 195:3 rwm"]}, ["nvidia3"]),
        ({"device_requests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=1"]}]}, ["nvidia4"]),
        ({"runtime": "nvidia", "environment": {"NVIDIA_VISIBLE_DEVICES": "0"}}, ["nvidia3"]),
        ({"runtime": "nvidia", "environment": ["NVIDIA_VISIBLE_DEVICES=1"]}, ["nvidia4"]),
        ({"environment": {"NVIDIA_VISIBLE_DEVICES": "0"}}, ["nvidia3"]),
        ({"runtime": "runc", "environment": {"NVIDIA_VISIBLE_DEVICES": "0"}}, []),
        ({"privileged": True}, EVERY),
    ],
)
def test_gpus_that_docker_py_s_options_pass(gpus, options, expected):
    gpus_passed = find_gpus_in_api_options(options, gpus, lambda: {"DefaultRuntime": "nvidia"})
    assert sorted(key for gpu in gpus_passed for key in list_lock_names(gpu)) == expected


def test_the_engine_is_queried_only_if_needed(gpus):
    assert find_user_gpus(parse_run_args(["--device", "/dev/fuse", "IMAGE"]), gpus, pytest.fail).gpus == ()
    assert (
        find_gpus_in_api_options({"devices": ["/dev/fuse"], "environment": {"A": "1"}}, gpus, pytest.fail)
        == ()
    )


def test_a_node_under_another_name(gpus, monkeypatch, tmp_path):
    (tmp_path / "gpu").symlink_to("/dev/null")
    words = parse_run_args(["--device", f"{tmp_path}/gpu", "IMAGE"])
    assert find_user_gpus(words, gpus, dict).gpus == ()
    monkeypatch.setattr(
        "imagematrix.launcher.gpu_claims.containers.MAJOR", 1
    )  # of /dev/null, whose minor is 3
    assert find_user_gpus(words, gpus, dict).gpus == gpus[:1]


@pytest.fixture
def start(make, monkeypatch):
    """Returns the launch of a command line on a node with three GPUs, of which `used` are in use."""

    def run(line, used=(), mode="exact", info=dict, mounted=None):
        uses = {f"nvidia{minor}": (WEB,) for minor in used}
        monkeypatch.setattr(module, "require_device_nodes", lambda _: None)
        gpus = [make.gpu(number, memory_mib=40_000) for number in range(3)]
        catalog = make.selection(*gpus, mode=mode).decision.catalog
        words = parse_run_args(line.split())

        def engine():
            return replace(make.engine(uses)(), get_info=info)

        result = make_request(words, make.host(*gpus), catalog, words.gpus, None, engine, mounted)
        chosen, first = result.plan_on_any()
        with result.claim_gpus(first, lambda _: None) as taken:
            return result.plan_on_claimed(taken, chosen, first)[1]

    return run


def devices(launch):
    return [path for path in launch.devices if path[11:].isdecimal()]


def test_a_passed_device_decides_the_selection(start):
    assert devices(start("--device /dev/nvidia4 IMAGE")) == ["/dev/nvidia4"]
    assert devices(start("--gpus 1 --device /dev/nvidia4 IMAGE")) == ["/dev/nvidia4"]
    assert devices(start("--gpus 2 --device /dev/nvidia5 IMAGE")) == ["/dev/nvidia3", "/dev/nvidia5"]
    assert devices(start("--gpus device=0 --device /dev/nvidia5 IMAGE")) == ["/dev/nvidia3"]
    assert devices(start("--gpus 1 IMAGE", used=[3])) == ["/dev/nvidia4"]


@pytest.mark.parametrize(
    "line",
    [
        "--device /dev/nvidia4 IMAGE",
        "--gpus 1 --device /dev/nvidia4 IMAGE",
        "--gpus device=0 --device=/dev/nvidia4:/dev/x IMAGE",
        "--gpus device=0 --privileged IMAGE",
        "--vram 4Gi --device nvidia.com/gpu=1 IMAGE",
    ],
)
def test_a_passed_device_in_use_is_refused(start, line):
    with pytest.raises(
        GpusBusyError, match=r"GPU 1 \(NVIDIA A100\) (is in use by|has .* free, shared with) container web"
    ):
        start(line, used=[4])


def test_what_a_rootless_engine_mounts_is_claimed(start):
    line = "--gpus device=0 -v /dev/nvidia4:/dev/nvidia4 IMAGE"
    rootless = {"SecurityOptions": ["name=rootless"]}
    start(line, used=[4])
    start(line, used=[4], info=lambda: rootless, mounted=[])  # no docker reads the options
    with pytest.raises(GpusBusyError, match="GPU 1"):
        start(line, used=[4], info=lambda: rootless)


def test_a_passed_device_is_claimed_for_a_cpu_image(start):
    launch = start("--gpus none --device /dev/nvidia4 IMAGE", mode=None)
    assert (launch.gpus, launch.devices) == ((), ())
    with pytest.raises(GpusBusyError, match="GPU 1"):
        start("--gpus none --device /dev/nvidia4 IMAGE", used=[4], mode=None)


def test_a_privileged_container_lists_its_devices(start):
    launch = start("--gpus device=0 --privileged IMAGE")
    assert devices(launch) == ["/dev/nvidia3", "/dev/nvidia4", "/dev/nvidia5"]
    assert [gpu.index for gpu in launch.gpus] == [0]


def test_a_share_of_a_passed_device(start):
    launch = start("--vram 4Gi --device /dev/nvidia4 IMAGE")
    assert devices(launch) == ["/dev/nvidia4"]
    assert launch.labels["io.imagematrix.vram"] == "4096"
