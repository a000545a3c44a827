"""A number of GPUs to take from a set."""

from __future__ import annotations

import pytest

from imagematrix.hardware.gpu_request.choice import (
    Choice,
    get_memory_mib,
    list_mig_devices,
    make_label,
    merge_gpus,
)
from imagematrix.hardware.host.host import MigDevice


def device(instance, memory_mib=None):
    """Return a MIG device."""
    return MigDevice(
        uuid=None, profile=None, gpu_instance=instance, compute_instance=0, memory_mib=memory_mib
    )


@pytest.fixture
def mig(make):
    """A GPU with two MIG devices, of 4000 and 8000 MiB."""
    return make.gpu(1, memory_mib=16_000, mig=(device(1, 4000), device(2, 8000)))


def test_the_first_are_taken(make):
    gpus = tuple(make.gpu(index) for index in range(3))
    assert Choice(gpus=gpus, count=2).first == gpus[:2]
    assert Choice(gpus=gpus, count=0).first == ()


def test_mig_devices_of_one_gpu_are_taken_together(make, mig):
    one, other = list_mig_devices(mig)
    assert Choice(gpus=(one, other), count=1).first == (one,)
    assert Choice(gpus=(one, make.gpu(2), other), count=3).first == (mig, make.gpu(2))
    assert merge_gpus([mig, make.gpu(1, mig=None)]) == (mig,)


def test_enough(make):
    assert Choice(gpus=(make.gpu(),), count=1).enough
    assert not Choice(gpus=(make.gpu(),), count=2).enough


def test_gpus_known_to_be_too_small_are_excluded(make, mig):
    unknown, small, large = (make.gpu(2, memory_mib=mib) for mib in (None, 1000, 8000))
    choice = Choice(gpus=(unknown, small, large, *list_mig_devices(mig)), count=2)
    assert choice.with_memory(8000) == Choice(gpus=(unknown, large, list_mig_devices(mig)[1]), count=2)


def test_memory_of_a_gpu_and_of_a_mig_device(make, mig):
    assert get_memory_mib(make.gpu(memory_mib=46_068)) == 46_068
    assert [get_memory_mib(part) for part in list_mig_devices(mig)] == [4000, 8000]
    assert get_memory_mib(mig) is None  # each device has memory of its own


def test_labels(make, mig):
    assert make_label(make.gpu(0)) == "GPU 0 (NVIDIA L40S)"
    assert make_label(mig) == "GPU 1 (NVIDIA L40S)"
    assert make_label(list_mig_devices(mig)[1]) == "GPU 1 (NVIDIA L40S):2:0"
