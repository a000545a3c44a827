"""`imagematrix doctor`: its findings compared with real launches."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
H200 = ROOT / "tests/hosts/genoa-h200.json"
SIMULATED = """
import sys
from imagematrix.cli import main
from imagematrix.hardware.host import probe
from imagematrix.hardware.host.host import Host
node = Host.load(sys.argv.pop(1))
probe.assemble_host = lambda *_, **__: node
main()
"""
CELL = "cuda=12.4,compute=9.0,driver=550.163.01,march=x86-64-v3"


@pytest.fixture(scope="module")
def image(engine):
    """The image of an H200 node."""
    engine.build_shipped(CELL)
    return engine.imagematrix("select", "training:v1", "--host", H200).stdout.strip()


def doctor(engine, *words):
    """Run the doctor on this machine with the hardware of another one."""
    command = [*engine.inside, sys.executable, "-c", SIMULATED, H200, "doctor", "--json", *words]
    done = subprocess.run(command, env=engine.environment, capture_output=True, text=True, check=False)
    return done.returncode, {one["check"]: one for one in json.loads(done.stdout)["findings"]}


def launches(engine):
    return engine.imagematrix("run", "--host", H200, "--rm", "training:v1", "true").returncode


@pytest.mark.usefixtures("nodes")
def test_a_launch_works_if_the_doctor_finds_nothing(engine, image):
    code, result = doctor(engine, "training:v1")
    assert code == 0
    bad = [one for one in result.values() if one["severity"] != "ok"]
    assert [one["check"] for one in bad] in ([], ["library"])  # the simulated node has no NVML
    assert result["image"]["saw"] == f"{image} fits this node"
    assert launches(engine) == 0
    assert engine.has_no_containers()


@pytest.mark.usefixtures("image")
def test_a_launch_fails_if_device_nodes_are_missing(engine):
    code, result = doctor(engine)
    assert (code, result["device-nodes"]["severity"]) == (5, "error")
    assert launches(engine) == 5


@pytest.mark.usefixtures("nodes")
def test_a_second_driver_in_an_image_is_found(engine, image, tmp_path):
    engine.docker("tag", image, "original:1")  # keeps the image
    (tmp_path / "Dockerfile").write_text(
        f"FROM {image}\nRUN mkdir -p /opt/old && echo other > /opt/old/libcuda.so.470.256.02\n"
    )
    try:
        engine.docker("build", "-t", image, str(tmp_path))
        code, result = doctor(engine, "training:v1")
        assert (code, result["image"]["severity"]) == (3, "error")
        assert "/opt/old/libcuda.so.470.256.02" in result["image"]["saw"]
    finally:
        engine.docker("tag", "original:1", image)


@pytest.mark.usefixtures("nodes", "image")
def test_a_mount_over_the_driver_is_found(engine, tmp_path):
    (tmp_path / "libcuda.so.1").touch()
    mount = f"{tmp_path}/libcuda.so.1:/opt/x/libcuda.so.1:ro"
    words = ("--gpus", "1", "-d", "--name", "shadowed", "-v", mount, "training:v1", "sleep", "300")
    assert engine.imagematrix("run", "--host", H200, *words).returncode == 0
    try:
        code, result = doctor(engine)
        assert (code, result["mounts"]["severity"]) == (0, "warning")
        assert f"{tmp_path}/libcuda.so.1 of the host hides the image's driver" in result["mounts"]["saw"]
    finally:
        engine.docker("rm", "-f", "shadowed")
