"""On a machine with an NVIDIA GPU: what is probed against what nvidia-smi says, and a real choice."""

import imagematrix as im
from imagematrix.facts import device_code


def test_the_probe_says_what_nvidia_smi_says(host, smi):
    rows = sorted(
        smi("gpu", "uuid", "name", "compute_cap", "driver_version", "pci.bus_id"), key=lambda row: row[4]
    )
    assert [(gpu.uuid, gpu.name, gpu.compute) for gpu in host.gpus] == [tuple(row[:3]) for row in rows]
    assert {row[3] for row in rows} == {host.driver.version}


def test_each_gpu_has_its_device_node(host):
    for gpu in host.gpus:
        assert f"/dev/nvidia{gpu.minor}" in host.devices


def test_an_image_with_this_driver_and_this_target_is_chosen(host):
    target = device_code.target(host.gpus[0].compute)
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
                    "cuda": "12.4" if int(target) < 100 else "13.0",
                    "cubins": [target],
                    "driver": {"mode": "exact", "version": driver},
                }
                for driver in (host.driver.version, "450.51.05")
            ],
        }
    )
    assert im.select(host, catalog, gpus="device=0").selected == wanted
