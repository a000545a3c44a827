"""On a machine with an NVIDIA GPU: a launch with device nodes and nothing else trains on it."""

import json
import os
import subprocess

import bundle
import pytest

import imagematrix as im
from imagematrix import engine as connection
from imagematrix.launch.devices import require
from imagematrix.launch.plan import plan

TRAIN = ["train", "--steps", "3"]


@pytest.fixture
def imported(engine, image):  # noqa: ARG001 - the engine has to be there
    """The name of the image, in the engine as long as the test takes."""
    reference = image.variant.reference
    client = connection.client()
    client.images.build(path=str(image.context), tag=reference, labels=image.labels, rm=True)
    yield "gpu-check:v1"
    client.images.remove(reference)
    client.close()


def trained_on(gpu, host, done):
    """Assert that the program ran in a container with this GPU, and computed there what the CPU does."""
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["backend"], report["error"]) == ("gpu", None)
    assert (report["libcuda"], report["device"], report["compute"]) == (
        host.driver.version,
        gpu.name,
        gpu.compute,
    )
    assert report["check"]["gpu_loss"] == pytest.approx(report["check"]["cpu_loss"], rel=1e-3)
    assert report["final_loss"] < report["initial_loss"]


def test_an_engine_starts_it(imported, image, host, imagematrix):
    chosen = imagematrix("select", imported, "--gpus", "device=0")
    assert chosen.stdout.strip() == image.variant.reference, chosen.stderr
    trained_on(host.gpus[0], host, imagematrix("run", "--rm", "--gpus", "device=0", imported, *TRAIN))


def test_a_runtime_alone_starts_it(oci, image, host, tmp_path):
    catalog = im.Catalog(image="gpu-check", version="v1", variants=(image.variant,))
    launch = plan(im.select(host, catalog, gpus="device=0"), TRAIN)
    require(launch.devices)
    bundle.write(tmp_path, image.root, launch)
    words = [oci, "run", "--bundle", tmp_path, f"gpu-check-{os.getpid()}"]
    trained_on(host.gpus[0], host, subprocess.run(words, capture_output=True, text=True, check=False))


def test_the_doctor_finds_nothing_that_would_stop_it(imported, image, imagematrix):
    done = imagematrix("doctor", imported)
    assert done.returncode == 0, done.stdout
    assert f"{image.variant.reference} fits this node" in done.stdout


def test_the_doctor_finds_the_node_in_order(imagematrix):
    findings = json.loads(imagematrix("doctor", "--json").stdout)["findings"]
    errors = [one for one in findings if one["severity"] == "error"]
    assert [one for one in errors if one["check"] not in ("engine", "docker-command")] == []


def test_users_and_memory_are_those_of_nvidia_smi(image, host, smi, imagematrix):
    training = image.root / "usr/local/bin/train"
    cubin = image.root / "usr/local/share/training/kernel.cubin"
    words = [training, "--cubin", cubin, "--steps", "1000000000"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert any(line == "train: training on the GPU\n" for line in process.stderr)
            told = {gpu["uuid"]: gpu for gpu in json.loads(imagematrix("gpus", "--json").stdout)["gpus"]}
            apps = {(uuid, int(pid)) for uuid, pid in smi("compute-apps", "gpu_uuid", "pid")}
            memory = smi("gpu", "uuid", "memory.total", "memory.used")
        finally:
            process.kill()
    assert (host.gpus[0].uuid, process.pid) in apps
    assert apps == {
        (uuid, use["pid"]) for uuid, gpu in told.items() for use in gpu["used_by"] if use["kind"] == "process"
    }
    for uuid, total, used in memory:
        assert told[uuid]["memory_mib"] == pytest.approx(int(total), abs=1)
        assert told[uuid]["memory_used_mib"] == pytest.approx(int(used), abs=16)
