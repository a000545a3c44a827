"""A simulated machine with GPUs, from the probe to a launched kernel.

The driver's files, device nodes, NVML and libcuda are simulated (tests/doubles/gpu_node.py). No command gets
a saved host: each probes the machine.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROFILE = ROOT / "tests/hosts/genoa-h200.json"
DRIVER = "550.163.01"


def answer(node, *words):
    done = node.imagematrix(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_probe_finds_the_machine(node):
    result, expected = answer(node, "probe"), json.loads(PROFILE.read_text())
    expected["driver"]["user_mode"] = None  # the machine has no file of it
    for key in ("driver", "gpus", "devices", "warnings"):
        assert result[key] == expected[key]


def test_a_run_trains_on_a_gpu(node):
    selected = node.imagematrix("select", "training:v1").stdout
    assert f"-drv{DRIVER}-sm90-" in selected
    done = node.imagematrix("run", "--rm", "--gpus", "1", "training:v1", "train", "--steps", "2")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["backend"], report["device"], report["compute"]) == ("gpu", "NVIDIA H200", "9.0")
    assert (report["libcuda"], report["cuda"], report["cubin"]) == (DRIVER, "12.4", "sm_90")
    assert report["check"]["gpu_loss"] == pytest.approx(report["check"]["cpu_loss"], rel=1e-5)


def test_without_all_device_nodes_a_container_has_no_gpu(node):
    image = node.imagematrix("select", "training:v1").stdout.strip()
    done = node.docker("run", "--rm", "--device", "/dev/nvidia0", image, "train", "--steps", "1")
    assert json.loads(done.stdout)["cuinit"] == {"code": 100, "name": "CUDA_ERROR_NO_DEVICE"}


def test_a_gpu_in_use_is_reported_and_not_claimed(node):
    words = ("--gpus", "device=2", "--name", "job", "-d", "training:v1", "train", "--steps", "1000000000")
    started = node.imagematrix("run", *words)
    assert started.returncode == 0, started.stderr
    try:
        with subprocess.Popen(
            ["docker", "logs", "-f", "job"], env=node.environment, stderr=subprocess.PIPE, text=True
        ) as log:
            assert "train: training on the GPU\n" in iter(log.stderr.readline, "")
            log.kill()
        uses = [
            [(use["kind"], use["name"].split()[0]) for use in gpu["used_by"]]
            for gpu in answer(node, "gpus")["gpus"]
        ]
        assert uses == [[("process", "train"), ("container", "job")] if n == 2 else [] for n in range(8)]
        refused = node.imagematrix("run", "--rm", "training:v1", "true")
        assert refused.returncode == 10
        message = "requested 8 GPUs, 7 free: GPU 2 (NVIDIA H200) is in use by process train (pid "
        assert message in refused.stderr
        others = node.imagematrix("run", "--rm", "--gpus", "7", "training:v1", "sh", "-c", "ls /dev")
        assert "nvidia2" not in others.stdout.split()
        assert others.stdout.count("nvidia") == 7 + 4
    finally:
        node.docker("rm", "-f", "job")


def test_the_memory_use_of_a_run_is_measured(node):
    words = ("--measure", "--gpus", "2", "--rm", "training:v1")
    done = node.imagematrix("run", *words, "sh", "-c", "timeout 3 train --steps 1000000000; exit 7")
    assert done.returncode == 7
    assert done.stderr.splitlines()[-1] == (
        "peak GPU memory, sampled every 0.2 s: 512 MiB on GPU 0 (NVIDIA H200), "
        "512 MiB on GPU 1 (NVIDIA H200); "
        "pass --vram 512Mi or more"
    )
    nothing = node.imagematrix("run", *words, "true")
    assert nothing.returncode == 0
    assert "peak GPU memory unknown" in nothing.stderr


@pytest.mark.long
def test_processes_of_shares_do_not_block_other_shares(node):
    """The process of a share does not block other shares; a process outside shares does."""
    share = ("--vram", "60Gi", "-d", "training:v1", "train", "--steps", "1000000000")
    by_name: dict[str, list[int]] = {name: [] for name in ("one", "two", "three")}
    try:
        for name in by_name:
            done = node.imagematrix("run", "--name", name, *share)
            assert done.returncode == 0, done.stderr
        for number, gpu in enumerate(answer(node, "gpus")["gpus"]):
            for use in gpu["used_by"]:
                if use["kind"] == "container":
                    by_name[use["name"].split()[0]].append(number)
        assert by_name == {"one": [0], "two": [0], "three": [1]}
    finally:
        node.docker("rm", "-f", *by_name)


def test_the_doctor_finds_no_problem(node):
    findings = answer(node, "doctor", "training:v1")["findings"]
    assert {one["severity"] for one in findings} == {"ok"}
    assert {"library", "device-nodes", "engine", "locks", "image"} <= {one["check"] for one in findings}


@pytest.mark.long
def test_all_checks_of_the_gpu_bundle_run(node, tmp_path):
    subprocess.run([sys.executable, ROOT / "ci/gpu_bundle", "--here", tmp_path / "bundle"], check=True)
    words = [*node.inside, tmp_path / "bundle/check", "--steps", "2", "--report", tmp_path / "report.md"]
    done = subprocess.run(words, env=node.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "report.md").read_text()
    (why,) = re.findall(r"\| not tried \| [\d.]+ \| (.*) \|", report)
    assert "PyTorch" in why
