"""Injection of the node's driver: through CDI if configured, and never next to a driver in the image."""

from __future__ import annotations

import json
import sys

import pytest

from imagematrix.launcher.docker.injection import find_second_driver, inject_through_cdi
from imagematrix.launcher.docker.options import parse_run_args
from imagematrix.launcher.docker.plan import format_docker_run, plan_launch

DEFAULT = {"DefaultRuntime": "nvidia"}


@pytest.fixture
def launch(make):
    return plan_launch(make.selection(make.gpu(0), make.gpu(1), mode="host", wanted="all"))


@pytest.fixture
def specs(tmp_path):
    """Return a writer of CDI specifications: a file's name, its kind and its devices."""

    def write(name, *devices, kind="nvidia.com/gpu", nodes=None):
        listed = [
            {"name": device}
            | (
                {"containerEdits": {"deviceNodes": [{"path": path} for path in nodes[device]]}}
                if nodes
                else {}
            )
            for device in devices
        ]
        spec = {"cdiVersion": "0.5.0", "kind": kind, "devices": listed}
        (tmp_path / name).write_text(json.dumps(spec))
        return [str(tmp_path)]

    return write


@pytest.mark.parametrize("file", ["nvidia.json", "nvidia.yaml"])
def test_gpus_are_cdi_devices_by_uuid(launch, specs, file):
    result = inject_through_cdi(launch, specs(file, "0", "1", "all", "GPU-0", "GPU-1"))
    assert result.injected == ("nvidia.com/gpu=GPU-0", "nvidia.com/gpu=GPU-1")
    words = format_docker_run(result)
    assert words[2:6] == ["--device", "nvidia.com/gpu=GPU-0", "--device", "nvidia.com/gpu=GPU-1"]
    assert "--gpus" not in words
    assert result.environment["NVIDIA_VISIBLE_DEVICES"] == "void"  # or the default runtime might add all
    assert "NVIDIA_VISIBLE_DEVICES" not in launch.environment


def test_gpus_are_cdi_devices_by_their_nodes(launch, specs):
    # The first GPU on the bus was with a virtual machine when this was written: its numbers are not ours.
    nodes = {
        "0": ["/dev/nvidia4", "/dev/dri/card1"],
        "1": ["/dev/nvidia3", "/dev/dri/card0"],
        "2:0": ["/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap12"],
        "all": ["/dev/nvidia3", "/dev/nvidia4"],
    }
    result = inject_through_cdi(launch, specs("a.json", *nodes, nodes=nodes))
    assert result.injected == ("nvidia.com/gpu=1", "nvidia.com/gpu=0")


def test_a_number_alone_does_not_identify_a_gpu(launch, specs):
    assert inject_through_cdi(launch, specs("a.json", "0", "1")) == launch


def test_a_mig_device_is_not_its_whole_gpu(make, specs):
    part = make.gpu(0, mig=(make.mig(1, uuid="MIG-1"),))
    launch = plan_launch(make.selection(part, mode="host", wanted="all"))
    assert launch.injected == ("MIG-1",)
    assert inject_through_cdi(launch, specs("a.json", "0", nodes={"0": ["/dev/nvidia3"]})) == launch


def test_if_one_is_missing_the_runtime_injects_all(launch, specs):
    for folders in (
        [],
        ["/no/such/folder"],
        specs("a.json", "GPU-0"),
        specs("a.json", "GPU-0", "GPU-1", kind="x.y/gpu"),
    ):
        assert inject_through_cdi(launch, folders) == launch
    assert "--gpus" in format_docker_run(launch)


def test_invalid_specifications_are_skipped(launch, specs, tmp_path):
    folders = specs("z.json", "GPU-0", "GPU-1")
    for name, text in {"a.json": "{", "b.yaml": "a: [", "c.json": "[]", "d.txt": "x", "e.yaml": "\t"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "f.json").write_bytes(b"\xff\xfe")
    (tmp_path / "g.json").write_text(
        '{"kind": "nvidia.com/gpu", "devices": [1, {"name": "0", "containerEdits": 1}]}'
    )
    (tmp_path / "h.json").write_text('{"kind": "nvidia.com/gpu", "devices": null}')
    (tmp_path / "i.json").mkdir()
    (tmp_path / "j.json").write_text("[" * 5_000)
    (tmp_path / "k.yaml").write_text("date: 2026-99-99\n")
    assert inject_through_cdi(launch, folders).cdi


def test_specifications_are_read_with_declared_dependencies(launch, specs, monkeypatch):
    monkeypatch.setitem(sys.modules, "ruamel", None)
    assert inject_through_cdi(launch, specs("nvidia.yaml", "GPU-0", "GPU-1")).cdi


def test_a_launch_without_gpus_is_unchanged(make, specs):
    alone = plan_launch(make.selection(mode=None))
    assert inject_through_cdi(alone, specs("a.json")) == alone


@pytest.mark.parametrize(
    ("line", "info", "by"),
    [
        ("IMAGE", DEFAULT, None),
        ("-e A=1 IMAGE", DEFAULT, None),
        (
            "-e NVIDIA_VISIBLE_DEVICES=all IMAGE",
            DEFAULT,
            "NVIDIA_VISIBLE_DEVICES=all with the runtime nvidia",
        ),
        ("-e NVIDIA_VISIBLE_DEVICES=all -e NVIDIA_VISIBLE_DEVICES=void IMAGE", DEFAULT, None),
        ("-e NVIDIA_VISIBLE_DEVICES IMAGE", DEFAULT, "NVIDIA_VISIBLE_DEVICES=5 with the runtime nvidia"),
        ("-e NVIDIA_VISIBLE_DEVICES=all IMAGE", {"DefaultRuntime": "runc"}, None),
        (
            "--runtime nvidia --env=NVIDIA_VISIBLE_DEVICES=0 IMAGE",
            {},
            "NVIDIA_VISIBLE_DEVICES=0 with the runtime nvidia",
        ),
        (
            "--runtime nvidia-legacy -e NVIDIA_VISIBLE_DEVICES=0 IMAGE",
            {},
            "NVIDIA_VISIBLE_DEVICES=0 with the runtime nvidia-legacy",
        ),
        ("--runtime runc -e NVIDIA_VISIBLE_DEVICES=0 IMAGE", DEFAULT, None),
        ("--device nvidia.com/gpu=0 IMAGE", {}, "--device nvidia.com/gpu=0"),
        ("--device runtime.nvidia.com/gpu=all IMAGE", {}, "--device runtime.nvidia.com/gpu=all"),
        ("--device /dev/fuse --device nvidia.com/mig=0:1 IMAGE", {}, "--device nvidia.com/mig=0:1"),
        ("--device /dev/fuse IMAGE", DEFAULT, None),
        ("--device imagematrix.io/gpu=0 IMAGE", DEFAULT, None),  # which has no driver
    ],
)
def test_options_that_inject_a_second_driver(line, info, by, monkeypatch):
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "5")
    assert find_second_driver(parse_run_args(line.split()), lambda: info) == by


def test_the_engine_is_queried_only_if_needed():
    assert find_second_driver(parse_run_args(["--rm", "IMAGE"]), pytest.fail) is None
