"""On a machine with an NVIDIA GPU: what is probed against what nvidia-smi says, and a real choice."""

import csv
import io
import shutil
import subprocess

import pytest

import imagematrix as im


@pytest.fixture
def smi():
    """One row for each GPU: uuid, name, compute capability, driver, in PCI bus order."""
    if not shutil.which("nvidia-smi"):
        pytest.skip("nvidia-smi is not installed")
    query = "--query-gpu=uuid,name,compute_cap,driver_version,pci.bus_id"
    text = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=True
    ).stdout
    return sorted(csv.reader(io.StringIO(text), skipinitialspace=True), key=lambda row: row[4])


def test_the_probe_says_what_nvidia_smi_says(smi):
    host = im.probe()
    assert host.driver is not None
    assert [(gpu.uuid, gpu.name, gpu.compute) for gpu in host.gpus] == [tuple(row[:3]) for row in smi]
    assert {row[3] for row in smi} == {host.driver.version}


def test_each_gpu_has_its_device_node():
    host = im.probe()
    assert host.gpus
    for gpu in host.gpus:
        assert f"/dev/nvidia{gpu.minor}" in host.devices


def test_an_image_with_this_driver_and_this_target_is_chosen():
    host = im.probe()
    target = host.gpus[0].compute.replace(".", "")
    wanted = f"t:v1-{host.driver.version}-sm{target}"
    catalog = im.Catalog.from_json(
        {
            "schema": "imagematrix.catalog/v1",
            "image": "t",
            "version": "v1",
            "variants": [
                {
                    "reference": f"t:v1-{driver}-sm{target}",
                    "platform": "linux/amd64" if host.arch == "x86_64" else "linux/arm64",
                    "cuda": "12.4" if host.gpus[0].compute < "10" else "13.0",
                    "cubins": [target],
                    "driver": {"mode": "exact", "version": driver},
                }
                for driver in (host.driver.version, "450.51.05")
            ],
        }
    )
    assert im.select(host, catalog, gpus="device=0").selected == wanted
