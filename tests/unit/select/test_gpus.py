"""What --gpus means."""

from __future__ import annotations

import pytest

from imagematrix.errors import UsageError
from imagematrix.probe.host import MigDevice
from imagematrix.select.gpus import among, choose, names, spec

A, B, C = (
    MigDevice(uuid=uuid, profile="1g.10gb", gpu_instance=instance, compute_instance=0)
    for uuid, instance in (("MIG-aa11", 7), ("MIG-aa22", 8), (None, 9))
)


@pytest.fixture
def node(make):
    """Return a host with five GPUs: 1 is lost, 3 is in MIG mode, 4 has no known UUID."""
    lost = make.gpu(1, state="lost")
    return make.host(make.gpu(0), lost, make.gpu(2), make.gpu(3, mig=(A, B, C)), make.gpu(4))


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [
        (None, [0, 1, 2, 3, 4]),
        ("all", [0, 1, 2, 3, 4]),
        ("none", []),
        ("1", [0]),
        ("2", [0, 2]),  # the first two that work
        ("4", [0, 2, 3, 4]),
        (4, [0, 2, 3, 4]),  # a library's caller has a number
        ("0,2", [0, 2]),
        ("2,0", [0, 2]),
        ("2, 0", [0, 2]),
        ("0,0", [0]),
        ("device=2", [2]),
        ("device=1,2", [1, 2]),
        ("GPU-2", [2]),
        ("GPU-2,GPU-0", [0, 2]),
        ("device=GPU-4", [4]),
        ("0,GPU-2", [0, 2]),
    ],
)
def test_choose(node, wanted, indices):
    assert [gpu.index for gpu in choose(node, wanted)] == indices


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("0", "asks for no GPU"),
        ("5", "has 5 GPUs, of which 4 can be used"),
        ("99999999999999999999", "of which 4"),
        ("device=9", "'9'"),
        ("0,9", "'9'"),
        ("0,", "''"),
        ("", "''"),
        ("-1", "'-1'"),
        ("GPU-x", "'GPU-x'"),
        ("GPU-", "several"),
        ("MIG-aa", "several"),
        ("MIG-x", "'MIG-x'"),
        ("foo", "'foo'"),
        ("3:1:0", "'3:1:0'"),
        ("٣", "'٣'"),
    ],
)
def test_what_is_not_there(node, wanted, words):
    with pytest.raises(UsageError) as caught:
        choose(node, wanted)
    assert words in str(caught.value)


def test_the_error_names_what_there_is(node, make):
    with pytest.raises(UsageError) as caught:
        choose(node, "device=9")
    assert "GPU 2 (NVIDIA L40S): GPU-2" in caught.value.remedy
    assert "MIG-aa11, MIG-aa22, 3:9:0" in caught.value.remedy
    with pytest.raises(UsageError) as caught:
        choose(make.host(), "device=0")
    assert caught.value.remedy == "it has no GPU"


@pytest.mark.parametrize(
    ("wanted", "devices"),
    [
        ("MIG-aa11", (A,)),
        ("MIG-aa2", (B,)),
        ("3:9:0", (C,)),
        ("MIG-aa22,3:9:0", (B, C)),
        ("MIG-aa22,MIG-aa22", (B,)),
        ("GPU-3", (A, B, C)),
        ("device=3", (A, B, C)),
    ],
)
def test_mig_devices(node, wanted, devices):
    (chosen,) = choose(node, wanted)
    assert chosen.index == 3
    assert set(chosen.mig) == set(devices)


def test_names_can_be_asked_for_again(node):
    for wanted in ("all", "0,2", "MIG-aa11", "3:9:0", "MIG-aa11,3:9:0"):
        chosen = choose(node, wanted)
        assert choose(node, ",".join(names(chosen))) == chosen


def test_names_without_uuids(make):
    node = make.host(make.gpu(0, mig=()), make.gpu(1))
    assert names(node.gpus) == ("GPU-0", "GPU-1")


@pytest.mark.parametrize("wanted", ["device=2", "0,2", "0,2,3"])
def test_spec(node, wanted):
    chosen = choose(node, wanted)
    assert spec(chosen) == wanted
    assert among(chosen, None) == chosen


def test_among_narrows(node):
    chosen = choose(node, "2,3,4")
    assert [gpu.index for gpu in among(chosen, "1")] == [2]
    with pytest.raises(UsageError):
        among(chosen, "device=0")
