"""What the tests of uses and claims share."""

import pytest

from imagematrix.allocation.locks import Locks
from imagematrix.node.host import Gpu, MigDevice


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "locks")


@pytest.fixture
def locks(folder):
    with Locks(folder) as found:
        yield found


@pytest.fixture(scope="session")
def gpu():
    """Makes a GPU whose minor is its index and ten more; `mig` are pairs of instance numbers.

    The capability of GPU instance i has the number 10 i, that of its compute instance j one more than j.
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
