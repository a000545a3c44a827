"""Builds see the cell, and nothing of the machine that builds: neither its GPUs nor its environment."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from drivers import library
from gpu_node import GpuNode, profiles

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
BASE = "debian:trixie"
DRIVER = "550.163.01"
MATRIX = {
    "schema": "imagematrix.matrix/v1",
    "images": {
        "seen": {"version": "v1", "template": "seen.j2", "context": "context", "device_code": "claim"}
    },
    "axes": {"cuda": ["12.4"], "driver": [DRIVER], "compute": ["9.0"], "march": ["znver4"]},
    "properties": {"march": {"znver4": {"compiler": "gcc-14"}}},
}
# What is there of variables, GPUs and drivers while an installer runs becomes a file of the image.
TEMPLATE = f"""\
{{% import "macros.j2" as debian %}}
FROM {BASE} AS install
{{{{ debian.installers(driver_cuda, compute, archspec, torch_backend) }}}}
RUN {{ env; ls -d /dev/nvidia* /proc/driver/nvidia; command -v nvidia-smi; }} 2>&1 | sort > /seen
FROM {BASE}
COPY libcuda.so.{DRIVER} /usr/lib/
COPY --from=install /seen /seen
"""
BUILDERS = {
    "genoa-h200": {},
    "broadwell-m60": {
        "CONDA_OVERRIDE_CUDA": "11.8",
        "CONDA_OVERRIDE_ARCHSPEC": "broadwell",
        "UV_TORCH_BACKEND": "auto",
        "CUDA_VISIBLE_DEVICES": "0",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NV_VARIANT_PROVIDER_FORCE_SM_ARCH": "5.2",
    },
}


@pytest.fixture(scope="module")
def built(engine, start_engine, tmp_path_factory):
    """The digest and the file for each machine that built the cell, which differ in GPUs and drivers."""
    results = {}
    for name, environment in BUILDERS.items():
        folder = tmp_path_factory.mktemp("project")
        shutil.copytree(ROOT / "templates", folder / "templates")
        (folder / "templates/seen.j2").write_text(TEMPLATE)
        (folder / "matrix.yaml").write_text(json.dumps(MATRIX))
        library(folder / "context", "libcuda", DRIVER)
        machine = start_engine(node=GpuNode(tmp_path_factory.mktemp("node"), name, profiles()))
        with subprocess.Popen(
            ["docker", "save", BASE], env=engine.environment, stdout=subprocess.PIPE
        ) as saved:
            subprocess.run(["docker", "load"], env=machine.environment, stdin=saved.stdout, check=True)
        probed = json.loads(machine.imagematrix("probe", "--json").stdout)
        words = ("build", "--json", "-f", folder / "matrix.yaml")
        done = machine.imagematrix(*words, env=machine.environment | environment)
        assert done.returncode == 0, done.stderr
        (cell,) = json.loads(done.stdout)["cells"]
        seen = machine.docker("run", "--rm", cell["reference"], "cat", "/seen").stdout.splitlines()
        results[name] = probed["driver"]["version"], cell["digest"], seen
    return results


def test_two_machines_with_other_gpus_and_drivers_build_the_same_bytes(built):
    drivers, digests, _ = zip(*built.values(), strict=True)
    assert len(set(drivers)) == len(BUILDERS)
    assert len(set(digests)) == 1
    assert digests[0].startswith("sha256:")


def test_an_installer_sees_the_values_of_the_cell_and_no_gpu(built):
    for _, _, seen in built.values():
        assert set(seen) >= {
            "CONDA_OVERRIDE_CUDA=12.4",
            "CONDA_OVERRIDE_CUDA_ARCH=9.0",
            "CONDA_OVERRIDE_ARCHSPEC=zen4",
            "UV_TORCH_BACKEND=cu124",
            "NV_VARIANT_PROVIDER_FORCE_CUDA_DRIVER_VERSION=12.4",
            "NV_VARIANT_PROVIDER_FORCE_SM_ARCH=9.0",
        }
        assert "VISIBLE_DEVICES" not in " ".join(seen)
        assert [line for line in seen if line.startswith("/")] == []
