"""Fixtures for the tests of usage and claims."""

import pytest

from imagematrix.hardware.host.host import Gpu, MigDevice
from imagematrix.launcher.gpu_claims.locks import Locks


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "locks")


@pytest.fixture
def locks(folder):
    with Locks(folder) as opened:
        yield opened


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
