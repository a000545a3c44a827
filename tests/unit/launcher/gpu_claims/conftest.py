"""Fixtures for the tests of usage and claims."""

import contextlib
import subprocess
import sys

import pytest

from imagematrix.hardware.gpu_request.choice import Choice
from imagematrix.hardware.host.host import Gpu, MigDevice
from imagematrix.launcher.gpu_claims.gpu_claim import ClaimRequest, LockFolder, claim_gpus
from imagematrix.launcher.gpu_claims.locks import Locks


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "locks")


@pytest.fixture
def locks(folder):
    with Locks(folder) as opened:
        yield opened


@pytest.fixture
def start_python():
    """Call it with a program of Python and its arguments to start it; it is killed in the end."""
    with contextlib.ExitStack() as stack:

        def start(program, *words):
            command = [sys.executable, "-c", program, *map(str, words)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            return process

        yield start


@pytest.fixture
def claim(folder, monkeypatch):
    """Call it with GPUs to claim `count` of them, or a share of each; all are unused unless `survey` differs.

    With `choices`, those of one of them are claimed. A claim that waits looks often.
    """
    monkeypatch.setattr("imagematrix.launcher.gpu_claims.gpu_claim.POLL_S", 0.01)

    def call(*gpus, count=1, choices=(), vram_mib=None, survey=lambda _: {}, **how):
        request = ClaimRequest(choices=choices or [Choice(gpus=gpus, count=count)], vram_mib=vram_mib)
        return claim_gpus(request, survey, folder=LockFolder(path=folder), **how)

    return call


@pytest.fixture(scope="session")
def gpu():
    """Makes a GPU whose minor is its index plus ten; `mig` are pairs of instance numbers.

    The capability number of GPU instance i is 10 i, that of its compute instance j is 10 i + j + 1.
    """

    def make(index=0, mig=None, **facts):
        devices = mig and tuple(
            MigDevice(
                uuid=f"MIG-{one}-{two}",
                profile=None,
                gpu_instance=one,
                compute_instance=two,
                capabilities=(10 * one, 10 * one + two + 1),
            )
            for one, two in mig
        )
        return Gpu(
            index=index,
            **({"minor": index + 10, "uuid": f"GPU-{index}", "name": "L40S", "mig": devices} | facts),
        )

    return make
