"""What NVIDIA_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES name where --gpus says nothing."""

from __future__ import annotations

import pytest

from imagematrix.errors import UsageError
from imagematrix.probe.host import MigDevice
from imagematrix.select.gpus import choose
from imagematrix.select.visible import CUDA, RUNTIME, visible


@pytest.fixture
def node(make):
    """Return a host with five GPUs: 1 is lost, 4 is in MIG mode."""
    parts = tuple(
        MigDevice(uuid=f"MIG-{instance}", profile=None, gpu_instance=instance, compute_instance=0)
        for instance in (1, 2)
    )
    return make.host(
        make.gpu(0), make.gpu(1, state="lost"), make.gpu(2), make.gpu(3, uuid=None), make.gpu(4, mig=parts)
    )


@pytest.mark.parametrize(
    ("runtime", "cuda", "indices"),
    [
        ("all", None, [0, 2, 3, 4]),
        ("none", None, []),
        ("void", None, []),
        ("0", None, [0]),
        ("1", None, [2]),  # the second that works
        ("2", None, [3]),  # whose UUID is unknown
        ("0, 3", None, [0, 4]),
        ("GPU-2", None, [2]),
        ("", "0,1", [0, 2]),
        (None, "1,0", [0, 2]),
        (None, "", []),
        (None, "-1", []),
        (None, "NoDevFiles", []),
        (None, "1,-1,0", [2]),
        (None, "GPU-0", [0]),
        ("0,1", "1", [2]),
        ("all", "2", [3]),
        ("none", "", []),
    ],
)
def test_what_is_visible(node, runtime, cuda, indices):
    told = {name: value for name, value in ((RUNTIME, runtime), (CUDA, cuda)) if value is not None}
    assert [gpu.index for gpu in choose(node, visible(node.gpus, told))] == indices


def test_mig_devices(node):
    (gpu,) = choose(node, visible(node.gpus, {CUDA: "MIG-2"}))
    assert [device.uuid for device in gpu.mig] == ["MIG-2"]


def test_nothing_is_said(node):
    assert visible(node.gpus, {}) is None
    assert visible(node.gpus, {RUNTIME: "", "OTHER": "1"}) is None


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({RUNTIME: "9"}, "NVIDIA_VISIBLE_DEVICES=9: the host has no '9'"),
        ({CUDA: "0,x"}, "CUDA_VISIBLE_DEVICES=0,x: the host has no 'x'"),
        ({RUNTIME: "0", CUDA: "1"}, "CUDA_VISIBLE_DEVICES=1: the host has no '2'"),
    ],
)
def test_what_is_not_there(node, told, words):
    with pytest.raises(UsageError) as caught:
        visible(node.gpus, told)
    assert str(caught.value) == words
    assert "unset" in caught.value.remedy
