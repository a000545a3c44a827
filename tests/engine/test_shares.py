"""Shares of a GPU among real containers: declared memory, and which processes belong to them."""

from pathlib import Path

import pytest

from imagematrix.errors import GpusBusyError
from imagematrix.hardware.gpu_request.choice import Choice
from imagematrix.hardware.host.host import Host
from imagematrix.hardware.host.nvml import Nvml, NvmlGpu, Process
from imagematrix.images.engine import containers
from imagematrix.launcher.gpu_claims.gpu_claim import ClaimRequest, LockFolder, claim_gpus
from imagematrix.launcher.gpu_claims.survey import survey_usage

H200 = Host.load(Path(__file__).parents[2] / "tests/hosts/genoa-h200.json")
GPU = H200.gpus[0]
HALF = GPU.memory_mib // 2

pytestmark = pytest.mark.usefixtures("nodes")


@pytest.fixture
def start(engine):
    """Call it with options of docker to start a container with the GPU and get its process."""

    def run(*options, image="debian:trixie"):
        node = f"/dev/nvidia{GPU.minor}"
        done = engine.docker("run", "-d", "--device", node, *options, image, "sleep", "300")
        return engine.inspect(done.stdout.strip())["State"]["Pid"]

    return run


@pytest.fixture
def look(engine, monkeypatch):
    """Surveys the engine's containers, with a simulated NVML: the given processes compute on the GPU."""
    monkeypatch.setenv("DOCKER_HOST", engine.host)

    def survey_with(*pids):
        processes = tuple(Process(pid=pid) for pid in pids)
        answer = Nvml(gpus=(NvmlGpu(index=0, minor=GPU.minor, processes=processes),))
        return lambda _: survey_usage((GPU,), containers.list_running, lambda: answer)

    return survey_with


def labels(taken):
    return [word for name, value in taken.labels.items() for word in ("--label", f"{name}={value}")]


def test_lease_container_and_process_of_a_launch_count_once(start, look, tmp_path):
    locks = str(tmp_path / "locks")

    def share(mib, *pids):
        return claim_gpus(
            ClaimRequest(choices=[Choice(gpus=(GPU,), count=1)], vram_mib=mib),
            look(*pids),
            folder=LockFolder(path=locks),
        )

    with share(HALF) as first:
        pid = start(*labels(first))
        with share(HALF, pid), pytest.raises(GpusBusyError, match=f"has {GPU.memory_mib % 2} MiB free"):
            share(HALF, pid)
    with pytest.raises(GpusBusyError):  # the container still has it without the lease
        share(GPU.memory_mib, pid)
    with share(HALF, pid), pytest.raises(GpusBusyError, match="share of"):
        claim_gpus(
            ClaimRequest(choices=[Choice(gpus=(GPU,), count=1)]), look(pid), folder=LockFolder(path=locks)
        )


def test_a_container_without_a_declared_share_has_the_whole_gpu(start, look, tmp_path):
    start("--label", "io.imagematrix.vram=1024")
    stranger = start()
    with pytest.raises(GpusBusyError, match="is in use by process sleep"):
        claim_gpus(
            ClaimRequest(choices=[Choice(gpus=(GPU,), count=1)], vram_mib=1),
            look(stranger),
            folder=LockFolder(path=str(tmp_path / "locks")),
        )


def test_a_process_outside_of_containers_has_the_whole_gpu(start, look, tmp_path):
    inside = start("--label", "io.imagematrix.vram=1024")
    with claim_gpus(
        ClaimRequest(choices=[Choice(gpus=(GPU,), count=1)], vram_mib=1),
        look(inside),
        folder=LockFolder(path=str(tmp_path / "locks")),
    ):
        pass
    with pytest.raises(GpusBusyError, match="is in use by process"):
        claim_gpus(
            ClaimRequest(choices=[Choice(gpus=(GPU,), count=1)], vram_mib=1),
            look(inside, 1),
            folder=LockFolder(path=str(tmp_path / "locks")),
        )


def test_labels_of_an_image_do_not_declare_a_share(engine, start, look, tmp_path):
    engine.docker("create", "--name", "lying", "debian:trixie")
    engine.docker("commit", "--change", "LABEL io.imagematrix.vram=1", "lying", "lying:v1")
    engine.docker("rm", "lying")
    start("--label", "io.imagematrix.vram=1024", image="lying:v1")
    with claim_gpus(
        ClaimRequest(choices=[Choice(gpus=(GPU,), count=1)], vram_mib=1),
        look(),
        folder=LockFolder(path=str(tmp_path / "locks")),
    ):
        pass
    start(image="lying:v1")
    with pytest.raises(GpusBusyError, match="is in use by container"):
        claim_gpus(
            ClaimRequest(choices=[Choice(gpus=(GPU,), count=1)], vram_mib=1),
            look(),
            folder=LockFolder(path=str(tmp_path / "locks")),
        )
