"""The names of resources: equal amounts have one name, and each name has one meaning."""

import pytest

from imagematrix.errors import UsageError
from imagematrix.hardware.host.host import Gpu, MigDevice
from imagematrix.integrations.swarm.resources import (
    count_fitting_shares,
    is_ours,
    make_share_kind,
    make_variable_name,
    parse_share_mib,
)


@pytest.mark.parametrize(
    ("size", "kind", "mib"),
    [
        ("4G", "VRAM-4G", 3814),
        ("4.0GB", "VRAM-4G", 3814),
        ("4000M", "VRAM-4G", 3814),
        ("1T", "VRAM-1000G", 953674),
        ("4Gi", "VRAM-4GI", 4096),
        ("4096MiB", "VRAM-4GI", 4096),
        ("1.5G", "VRAM-1500M", 1430),
        ("1.5Gi", "VRAM-1536MI", 1536),
    ],
)
def test_a_size_and_its_kind(size, kind, mib):
    assert make_share_kind(size) == kind
    assert parse_share_mib(kind) == mib


@pytest.mark.parametrize("size", ["", "4", "G", "0G", "0.5M", "4g", "-4G", "0.001Mi"])
def test_invalid_sizes(size):
    with pytest.raises(UsageError, match=f"^invalid size of shares {size}: expected an amount"):
        make_share_kind(size)


def test_a_share_is_on_one_gpu():
    gpus = [Gpu(index=0, memory_mib=24564), Gpu(index=1, memory_mib=11264), Gpu(index=2)]
    assert count_fitting_shares(gpus, "VRAM-4G") == 6 + 2
    assert count_fitting_shares(gpus, "VRAM-16G") == 1
    assert count_fitting_shares(gpus, "VRAM-0G") == 0


def test_a_mig_device_has_its_own_memory():
    device = MigDevice(uuid="MIG-a", profile="1g.10gb", gpu_instance=1, compute_instance=0, memory_mib=9728)
    assert count_fitting_shares([Gpu(index=0, memory_mib=81559, mig=(device,))], "VRAM-4G") == 2


def test_the_variable_of_a_kind():
    assert make_variable_name("NVIDIA-GPU") == "DOCKER_RESOURCE_NVIDIA-GPU"
    assert make_variable_name("gpu") == "DOCKER_RESOURCE_GPU"


@pytest.mark.parametrize(
    ("kind", "ours"),
    [
        ("NVIDIA-GPU", True),
        ("VRAM", True),
        ("VRAM-4G", True),
        ("VRAM-512MI", True),
        ("gpu", False),
        ("VRAM-4g", False),
        ("VRAM-", False),
        ("SSD", False),
    ],
)
def test_own_kinds_are_recognised(kind, ours):
    assert is_ours(kind) is ours
