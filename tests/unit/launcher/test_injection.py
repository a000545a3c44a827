"""Injection of the node's driver: through CDI if configured, and never next to a driver in the image."""

from __future__ import annotations

import json
import sys

import pytest

from imagematrix.launcher.injection import second_driver, through_cdi
from imagematrix.launcher.options import split
from imagematrix.launcher.plan import docker_run, plan

DEFAULT = {"DefaultRuntime": "nvidia"}


@pytest.fixture
def launch(make):
    return plan(make.selection(make.gpu(0), make.gpu(1), mode="host", wanted="all"))


@pytest.fixture
def specs(tmp_path):
    """Return a writer of CDI specifications: a file's name, its kind and its devices."""

    def write(name, *devices, kind="nvidia.com/gpu"):
        spec = {"cdiVersion": "0.5.0", "kind": kind, "devices": [{"name": device} for device in devices]}
        (tmp_path / name).write_text(json.dumps(spec))
        return [str(tmp_path)]

    return write


@pytest.mark.parametrize("file", ["nvidia.json", "nvidia.yaml"])
def test_gpus_are_cdi_devices_by_uuid(launch, specs, file):
    result = through_cdi(launch, specs(file, "0", "1", "all", "GPU-0", "GPU-1"))
    assert result.injected == ("nvidia.com/gpu=GPU-0", "nvidia.com/gpu=GPU-1")
    words = docker_run(result)
    assert words[2:6] == ["--device", "nvidia.com/gpu=GPU-0", "--device", "nvidia.com/gpu=GPU-1"]
    assert "--gpus" not in words


def test_gpus_are_cdi_devices_by_index(launch, specs):
    assert through_cdi(launch, specs("a.json", "0", "1")).injected == ("nvidia.com/gpu=0", "nvidia.com/gpu=1")


def test_if_one_is_missing_the_runtime_injects_all(launch, specs):
    for folders in ([], ["/no/such/folder"], specs("a.json", "0"), specs("a.json", "0", "1", kind="x.y/gpu")):
        assert through_cdi(launch, folders) == launch
    assert "--gpus" in docker_run(launch)


def test_invalid_specifications_are_skipped(launch, specs, tmp_path):
    folders = specs("z.json", "0", "1")
    for name, text in {"a.json": "{", "b.yaml": "a: [", "c.json": "[]", "d.txt": "x", "e.yaml": "\t"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "f.json").write_bytes(b"\xff\xfe")
    (tmp_path / "g.json").write_text('{"kind": "nvidia.com/gpu", "devices": [1, {"name": "0"}]}')
    (tmp_path / "h.json").write_text('{"kind": "nvidia.com/gpu", "devices": null}')
    (tmp_path / "i.json").mkdir()
    (tmp_path / "j.json").write_text("[" * 5_000)
    (tmp_path / "k.yaml").write_text("date: 2026-99-99\n")
    assert through_cdi(launch, folders).cdi


def test_specifications_are_read_with_declared_dependencies(launch, specs, monkeypatch):
    monkeypatch.setitem(sys.modules, "ruamel", None)
    assert through_cdi(launch, specs("nvidia.yaml", "0", "1")).cdi


def test_a_launch_without_gpus_is_unchanged(make, specs):
    alone = plan(make.selection(mode=None))
    assert through_cdi(alone, specs("a.json")) == alone


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
        ("-e NVIDIA_VISIBLE_DEVICES=all IMAGE", {"DefaultRuntime": "runc"}, None),
        (
            "--runtime nvidia --env=NVIDIA_VISIBLE_DEVICES=0 IMAGE",
            {},
            "NVIDIA_VISIBLE_DEVICES=0 with the runtime nvidia",
        ),
        ("--runtime runc -e NVIDIA_VISIBLE_DEVICES=0 IMAGE", DEFAULT, None),
        ("--device nvidia.com/gpu=0 IMAGE", {}, "--device nvidia.com/gpu=…"),
        ("--device /dev/fuse IMAGE", DEFAULT, None),
    ],
)
def test_options_that_inject_a_second_driver(line, info, by):
    assert second_driver(split(line.split()), lambda: info) == by


def test_the_engine_is_queried_only_if_needed():
    assert second_driver(split(["--rm", "IMAGE"]), pytest.fail) is None
