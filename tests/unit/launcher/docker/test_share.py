"""The variables that describe a share to its container, and use of an MPS daemon."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from mps import daemon

from imagematrix.errors import ProbeError, UsageError
from imagematrix.hardware.host.host import MigDevice
from imagematrix.launcher.docker.share import Mps, Share, find_mps


def test_a_whole_gpu_needs_no_variables(make):
    assert Share().environment((make.gpu(),)) == {}
    assert Share(vram_mib=4096, mps=Mps()).environment(()) == {}  # CPU-only images


def test_the_fraction_leaves_room_for_the_cuda_context(make):
    gpu = make.gpu(memory_mib=20_000)
    assert Share(vram_mib=10_800).environment((gpu,)) == {
        "IMAGEMATRIX_VRAM_MIB": "10800",
        "IMAGEMATRIX_VRAM_FRACTION": "0.5000",
    }


@pytest.mark.parametrize(
    ("mib", "totals", "fraction"),
    [
        (20_800, [30_000], "0.6666"),  # rounded down
        (801, [46_068], "0.000021"),  # but not to zero
        (810, [20_000], "0.00050"),
        (900, [20_000], "0.0050"),
        (4_800, [10_000, 40_000], "0.1000"),  # of the largest
    ],
)
def test_the_fraction_of_a_share(make, mib, totals, fraction):
    gpus = tuple(make.gpu(index, memory_mib=total) for index, total in enumerate(totals))
    result = Share(vram_mib=mib).environment(gpus)["IMAGEMATRIX_VRAM_FRACTION"]
    assert result == fraction
    assert 0 < float(result) <= (mib - 800) / max(totals)


def test_the_memory_of_a_mig_device_counts(make):
    device = MigDevice(uuid="MIG-1", profile="1g.10gb", gpu_instance=1, compute_instance=0, memory_mib=10_000)
    gpu = make.gpu(memory_mib=80_000, mig=(device,))
    assert Share(vram_mib=5_800).environment((gpu,))["IMAGEMATRIX_VRAM_FRACTION"] == "0.5000"


def test_unknown_memory_gives_no_fraction(make):
    assert Share(vram_mib=1000).environment((make.gpu(),)) == {"IMAGEMATRIX_VRAM_MIB": "1000"}


def test_a_share_smaller_than_the_cuda_context(make):
    with pytest.raises(UsageError, match="800 MiB too small"):
        Share(vram_mib=800).environment((make.gpu(memory_mib=20_000),))


def test_a_share_larger_than_a_gpu(make):
    gpus = (make.gpu(0, memory_mib=40_000), make.gpu(1, memory_mib=20_000))
    with pytest.raises(UsageError, match="20001 MiB exceeds the memory of a GPU: 20000 MiB"):
        Share(vram_mib=20_001).environment(gpus)


def test_mps_limits_each_gpu_as_the_container_counts_them(make):
    gpus = (make.gpu(4, memory_mib=20_000), make.gpu(7, memory_mib=20_000))
    share = Share(vram_mib=4096, mps=Mps(pipes="/run/mps", threads=25))
    environment = share.environment(gpus)
    assert environment["CUDA_MPS_PIPE_DIRECTORY"] == "/run/mps"
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=4096M,1=4096M"
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert Share(mps=Mps()).environment(gpus) == {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps"}


@pytest.fixture
def pipes():
    """A folder with a short name: a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="imx") as folder:
        yield Path(folder)


def test_the_daemon_is_detected_by_its_socket(pipes):
    with daemon(pipes):
        result = find_mps({"CUDA_MPS_PIPE_DIRECTORY": str(pipes)}, 30)
        assert result == Mps(pipes=str(pipes), user=os.getuid(), threads=30)
    with pytest.raises(
        ProbeError, match=r"control: Connection refused"
    ):  # it has ended, and its socket stays
        find_mps({"CUDA_MPS_PIPE_DIRECTORY": str(pipes)})


def test_another_program_s_socket_is_not_the_daemon_s(pipes):
    with (
        daemon(pipes, "other") as process,
        pytest.raises(ProbeError, match=rf"belongs to process other \(pid {process.pid}, "),
    ):
        find_mps({"CUDA_MPS_PIPE_DIRECTORY": str(pipes)})


def test_without_a_daemon(tmp_path):
    with pytest.raises(ProbeError, match=r"control: No such file") as caught:
        find_mps({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})
    assert "nvidia-cuda-mps-control -d" in caught.value.remedy
    os.mkfifo(tmp_path / "control")
    with pytest.raises(ProbeError, match=r"control: Connection refused"):
        find_mps({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})
