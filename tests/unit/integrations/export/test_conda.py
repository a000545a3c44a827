"""`probe --format conda`: what conda would detect on a node."""

import os

import pytest

from imagematrix.hardware.host.host import Cpu, Driver, Gpu, Host
from imagematrix.integrations.export.conda import make_variables

GENOA = Host.load("tests/hosts/genoa-h200.json")


def host(*gpus, driver="550.163.01", arch="x86_64"):
    loaded = Driver(version=driver, kind=None, source="") if driver else None
    cpu = Cpu(vendor="AuthenticAMD", model=None, flags=frozenset(), level=None)
    return Host(arch=arch, cpu=cpu, driver=loaded, gpus=gpus)


def test_a_gpu_node_has_what_conda_would_detect_there():
    assert make_variables(GENOA, "2.36") == {
        "CONDA_OVERRIDE_CUDA": "12.4",
        "CONDA_OVERRIDE_CUDA_ARCH": "9.0",
        "CONDA_OVERRIDE_ARCHSPEC": "zen4",
        "CONDA_OVERRIDE_GLIBC": "2.36",
    }


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [
        ("535.261.03", "12.2"),
        ("550.163.01", "12.4"),
        ("580.65.06", "13.0"),
        (None, ""),
        ("100.10", None),  # older than the table
        ("35.4.1", None),  # Tegra's
    ],
)
def test_the_driver_decides_on_cuda(driver, cuda):
    assert make_variables(host(driver=driver), None)["CONDA_OVERRIDE_CUDA"] == cuda


@pytest.mark.parametrize(
    ("gpus", "least"),
    [
        ((), ""),
        ((Gpu(index=0, compute="9.0"), Gpu(index=1, compute="10.0")), "9.0"),
        ((Gpu(index=0, compute="9.0"), Gpu(index=1, compute="7.5", state="lost")), "9.0"),
        ((Gpu(index=0, compute="9.0", state="lost"),), ""),
        ((Gpu(index=0, compute="9.0"), Gpu(index=1)), None),
    ],
)
def test_the_least_capability_of_the_gpus_that_work(gpus, least):
    assert make_variables(host(*gpus), None)["CONDA_OVERRIDE_CUDA_ARCH"] == least
    assert make_variables(host(*gpus, driver=None), None)["CONDA_OVERRIDE_CUDA_ARCH"] == ""


def test_an_architecture_without_names_is_unknown():
    assert make_variables(host(arch="riscv64"), None)["CONDA_OVERRIDE_ARCHSPEC"] is None


def test_the_command_prints_lines_for_a_shell(cli, monkeypatch):
    monkeypatch.setattr(os, "confstr", lambda _: "glibc 2.36")
    result = cli("probe", "--nvidia-smi", "tests/unit/hardware/host/dumps/550-lost.xml", "--format", "conda")
    assert result.code == 0
    lines = dict(line.split("=") for line in result.out.splitlines())
    assert lines.pop("CONDA_OVERRIDE_ARCHSPEC")
    assert lines == {
        "CONDA_OVERRIDE_CUDA": "12.4", "CONDA_OVERRIDE_CUDA_ARCH": "8.9", "CONDA_OVERRIDE_GLIBC": "2.36"
    }  # fmt: skip


@pytest.mark.parametrize("answer", [lambda _: None, lambda _: "musl 1.2", lambda _: int("not known")])
def test_another_c_library_is_left_out(cli, monkeypatch, answer):
    monkeypatch.setattr(os, "confstr", answer)
    result = cli("probe", "--format", "conda")
    assert "GLIBC" not in result.out
    assert "CONDA_OVERRIDE_GLIBC is left out: unknown for this node" in result.err


def test_a_captured_tree_does_not_get_this_machine_s_c_library(cli, tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor : 0\nvendor_id : AuthenticAMD\nflags : fpu lm sse2\n")
    result = cli("probe", "--root", tmp_path, "--format", "conda")
    assert result.out == ("CONDA_OVERRIDE_CUDA=\nCONDA_OVERRIDE_CUDA_ARCH=\nCONDA_OVERRIDE_ARCHSPEC=x86_64\n")
    assert "CONDA_OVERRIDE_GLIBC is left out" in result.err


def test_formats(cli):
    assert cli("probe", "--format", "json").out == cli("probe", "--json").out
    assert cli("probe", "--format", "json", "--json").code == 0
    cli("probe", "--format", "conda", "--json").refuses(2, "--json and --format conda are mutually exclusive")
    cli("probe", "--format", "condor").refuses(2, "invalid format: 'condor'")
