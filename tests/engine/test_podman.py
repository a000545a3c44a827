"""Podman as the engine, through its service with Docker's API, on a machine with simulated GPUs."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cdi import LIST, etc_with
from podman import Podman

ROOT = Path(__file__).parents[2]
TRAIN = ("train", "--steps", "2")
LAUNCH = """\
import imagematrix as im
choice = im.select(im.probe(), im.open_catalog("training:v1"))
print(im.launch(choice, ["train", "--steps", "1000000000"], gpus="device=3", name="job").name)
"""


@pytest.fixture(scope="module")
def podman(node):
    """Podman on the machine, with the images that Docker has there."""
    if not shutil.which("podman"):
        lacks = pytest.fail if os.environ.get("CI") else pytest.skip
        lacks("podman is not installed")
    names = node.docker("images", "--format", "{{.Repository}}:{{.Tag}}", "training").stdout.split()
    service = Podman(node)
    with subprocess.Popen(["docker", "save", *names], env=node.environment, stdout=subprocess.PIPE) as saved:
        loaded = service.on_node("docker", "load", stdin=saved.stdout)
    assert loaded.returncode == 0, loaded.stderr
    yield service
    service.remove()


def test_podman_images_are_a_catalog(podman):
    references = [one["reference"] for one in podman.answer("ls", "training:v1")["variants"]]
    gpu, cpu = sorted(references, key=lambda name: "-cpu-" in name)
    assert gpu.startswith("training:v1-cuda12.4-drv550.163.01-sm90-")
    assert podman.imagematrix("select", "training:v1").stdout.strip() == gpu
    assert podman.imagematrix("select", "training:v1", "--gpus", "none").stdout.strip() == cpu
    assert "<- selected" in podman.imagematrix("explain", "training:v1").stdout


def test_docker_s_command_starts_a_cpu_only_image(podman):
    done = podman.imagematrix("run", "--rm", "--gpus", "none", "training:v1", *TRAIN)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["backend"] == "cpu"
    # With --rm, podman 4.3 would say 0.
    words = ("--gpus", "none", "training:v1", "sh", "-c", "exit 42")
    assert podman.imagematrix("run", *words).returncode == 42


def test_podman_s_command_runs_what_a_dry_run_prints(podman):
    dry = podman.imagematrix("run", "--dry-run", "--rm", "--gpus", "device=1", "training:v1", *TRAIN)
    words = shlex.split(dry.stdout)
    done = podman.on_node("podman", "--url", podman.host, *words[1:])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["backend"], report["device"]) == ("gpu", "NVIDIA H200")


def test_the_doctor_reports_whether_docker_s_command_can_pass_gpus(podman):
    """It can from some version on; the doctor and a launch agree for the installed one."""
    (result,) = [one for one in podman.answer("doctor")["findings"] if one["check"] == "engine"]
    assert "podman" in result["saw"]
    done = podman.imagematrix("run", "--rm", "--gpus", "1", "training:v1", "true")
    assert (done.returncode == 0) == (result["severity"] == "ok"), done.stderr


def test_a_container_started_by_the_library_uses_its_gpu(podman):
    done = podman.on_node(sys.executable, "-c", LAUNCH)
    assert done.stdout == "job\n", done.stderr
    try:
        (busy,) = [gpu for gpu in podman.answer("gpus")["gpus"] if not gpu["free"]]
        assert busy["index"] == 3
        assert "container" in {use["kind"] for use in busy["used_by"]}
        refused = podman.imagematrix("run", "--gpus", "device=3", "training:v1", "true")
        assert refused.returncode == 10
        assert "container job (" in refused.stderr
    finally:
        podman.on_node("docker", "rm", "-f", "job")


def test_the_doctor_audits_podman_images(podman):
    (result,) = [one for one in podman.answer("doctor", "training:v1")["findings"] if one["check"] == "image"]
    assert result["severity"] == "ok", result["saw"]


def test_podman_passes_cdi_devices_and_no_other_nodes(podman):
    written = podman.imagematrix("export", "cdi", "-o", podman.folder / "cdi")
    assert written.returncode == 0, written.stderr
    image = podman.imagematrix("select", "training:v1").stdout.strip()
    uuid = podman.answer("probe")["gpus"][1]["uuid"]
    control = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}
    for names, nodes in (
        ((), set()),
        ((uuid,), {"/dev/nvidia1"}),
        (("0", "3"), {"/dev/nvidia0", "/dev/nvidia3"}),
    ):
        devices = [word for name in names for word in ("--device", f"imagematrix.io/gpu={name}")]
        words = [*etc_with(podman.folder), *podman.words, "run", "--rm", *devices, image, *LIST]
        ran = podman.on_node(*words)
        assert ran.returncode == 0, ran.stderr
        assert set(ran.stdout.split()) == (nodes | control if names else set())
