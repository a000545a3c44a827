"""The values of --gpus."""

from __future__ import annotations

import pytest

from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.hardware.gpu_request.choice import Choice
from imagematrix.hardware.gpu_request.conditions import parse_condition
from imagematrix.hardware.gpu_request.spec import (
    find_candidates,
    make_exact_spec,
    make_spec,
    name_gpus,
    select_gpus,
)
from imagematrix.hardware.host.host import MigDevice

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
        ("2", [0, 2]),  # the first two usable ones
        ("4", [0, 2, 3, 4]),
        (4, [0, 2, 3, 4]),  # a number from the library
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
        ([0], [0]),  # in a list, a number is an index
        ((2, 0), [0, 2]),
        (["GPU-2", 0, "0"], [0, 2]),
    ],
)
def test_named_gpus_are_found(node, wanted, indices):
    assert [gpu.index for gpu in select_gpus(node.gpus, wanted)] == indices


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("0", "the count must be at least 1"),
        ("5", "4 of the host's 5 GPUs are usable"),
        ("999999999", "4 of the host's 5 GPUs"),
        ("9" * 5000, "'999"),
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
def test_missing_gpus_are_rejected(node, wanted, words):
    with pytest.raises(UsageError) as caught:
        select_gpus(node.gpus, wanted)
    assert words in str(caught.value)


def test_the_error_lists_the_gpus_of_the_host(node):
    with pytest.raises(UsageError) as caught:
        select_gpus(node.gpus, "device=9")
    assert "GPU 2 (NVIDIA L40S): GPU-2" in caught.value.remedy
    assert "MIG-aa11, MIG-aa22, 3:9:0" in caught.value.remedy
    with pytest.raises(UsageError) as caught:
        select_gpus((), "device=0")
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
    (chosen,) = select_gpus(node.gpus, wanted)
    assert chosen.index == 3
    assert set(chosen.mig) == set(devices)


def test_names_select_the_same_gpus_again(node):
    for wanted in ("all", "0,2", "MIG-aa11", "3:9:0", "MIG-aa11,3:9:0"):
        chosen = select_gpus(node.gpus, wanted)
        assert select_gpus(node.gpus, ",".join(name_gpus(chosen))) == chosen


def test_names_without_uuids(make):
    node = make.host(make.gpu(0, mig=()), make.gpu(1))
    assert name_gpus(node.gpus) == ("GPU-0", "GPU-1")


@pytest.mark.parametrize("wanted", ["device=2", "0,2", "0,2,3"])
def test_spec(node, wanted):
    chosen = select_gpus(node.gpus, wanted)
    assert make_spec(chosen) == wanted
    assert select_gpus(chosen, None) == chosen


def test_among_narrows(node):
    chosen = select_gpus(node.gpus, "2,3,4")
    assert [gpu.index for gpu in select_gpus(chosen, "1")] == [2]
    with pytest.raises(UsageError):
        select_gpus(chosen, "device=0")


def test_candidates_can_be_more_than_the_count(node):
    choice = find_candidates(node.gpus, "2")
    assert ([gpu.index for gpu in choice.gpus], choice.count) == ([0, 2, 3, 4], 2)
    assert find_candidates(node.gpus, "none") == Choice(gpus=(), count=0)
    assert find_candidates(node.gpus, None) == Choice(gpus=node.gpus, count=5)
    choice = find_candidates(node.gpus, "MIG-aa11,0")
    assert ([gpu.index for gpu in choice.gpus], choice.count) == ([0, 3], 2)


def test_gpu_objects_are_accepted(node):
    some = node.gpus[1:3]
    assert find_candidates(node.gpus, some) == Choice(gpus=some, count=2)
    assert select_gpus(node.gpus, some) == some


@pytest.fixture
def mixed(make):
    return make.host(
        make.gpu(0, name="Tesla T4", compute="7.5", memory_mib=15360),
        make.gpu(1, name="NVIDIA A100-SXM4-40GB", compute="8.0", memory_mib=40960),
        make.gpu(2, name="NVIDIA L40S", compute="8.9", memory_mib=46068),
        make.gpu(3, name="NVIDIA H100 80GB HBM3", compute="9.0", memory_mib=81559),
        make.gpu(4, name="NVIDIA H100 80GB HBM3", compute="9.0", memory_mib=81559, state="lost"),
        make.gpu(5, name=None, compute=None, memory_mib=None),
        make.gpu(6, name="NVIDIA B200", compute="10.0", memory_mib=183359),
    )


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [
        ("compute>=8.0", [1, 2, 3, 6]),
        ("compute > 9.0", [6]),  # 10.0 is more than 9.0
        ("compute<8.0", [0]),
        ("compute!=7.5", [1, 2, 3, 6]),
        ("name=L40S", [2]),
        ("name=l40s", [2]),
        ("name=A100-SXM4", [1]),
        ("name=H100 80GB", [3]),
        ("name!=H100", [0, 1, 2, 6]),
        ("memory>=40G", [1, 2, 3, 6]),
        ("memory>=80G", [3, 6]),  # sold as 80 GB
        ("memory>=80GiB", [6]),
        ("memory<=15Gi", [0]),
        ("memory=15360MiB", [0]),
        ("memory<0.1T", [0, 1, 2, 3]),
        ("2,memory>=40G", [1, 2]),
        ("memory>=40G,2", [1, 2]),
        ("all,memory>=40G", [1, 2, 3, 6]),
        ("1,compute>=8.0,compute<9.0,memory>=45G", [2]),
    ],
)
def test_conditions(mixed, wanted, indices):
    assert [gpu.index for gpu in select_gpus(mixed.gpus, wanted)] == indices


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("name=L4", "0 of 7 GPUs are usable and match"),
        ("5,memory>=40G", "4 of 7 GPUs are usable"),
        ("0,memory>=40G", "4 of 7 GPUs are usable"),
        ("0,2,memory>=40G", "one count"),
        (f"{'9' * 5000},memory>=40G", "invalid condition"),
        ("GPU-0,memory>=40G", "invalid condition 'GPU-0'"),
        ("memory>=40", "invalid condition 'memory>=40'"),
        ("memory>=G", "invalid condition"),
        ("compute>=8", "invalid condition"),
        ("name>L40S", "invalid condition"),
        ("name=-", "invalid condition"),
        ("size>=4G", "invalid condition"),
        ("=", "invalid condition"),
        ("1,,memory>=1G", "invalid condition ''"),
    ],
)
def test_unsatisfied_or_invalid_conditions_are_rejected(mixed, wanted, words):
    with pytest.raises(UsageError) as caught:
        select_gpus(mixed.gpus, wanted)
    assert words in str(caught.value)
    assert caught.value.remedy


def test_unknown_facts_satisfy_no_condition(make):
    for text in ("name!=T4", "compute!=7.5", "memory>=0M"):
        assert not parse_condition(text).is_met(make.gpu(0, name=None, compute=None, memory_mib=None))


def test_the_error_about_conditions_lists_the_kinds_of_gpus(mixed):
    with pytest.raises(UsageError) as caught:
        select_gpus(mixed.gpus, "name=L4")
    assert "2 x NVIDIA H100 80GB HBM3, compute 9.0, 81559 MiB" in caught.value.remedy
    assert "1 x unknown, compute unknown, unknown MiB" in caught.value.remedy
    with pytest.raises(UsageError) as caught:
        select_gpus((), "name=L4")
    assert caught.value.remedy == "it has no GPU"


@pytest.fixture
def parted(make):
    """Return a host with a whole GPU, two in MIG mode with devices of several profiles, and a lost one."""

    def parts(index, *profiles, **facts):
        devices = (
            MigDevice(uuid=f"MIG-{index}{number}", profile=profile, gpu_instance=number, compute_instance=0)
            for number, profile in enumerate(profiles)
        )
        return make.gpu(index, mig=tuple(devices), **facts)

    return make.host(
        make.gpu(0),
        parts(1, "3g.40gb", "1g.10gb", "1g.10gb+me", compute="9.0"),
        parts(2, "1g.10gb", None, "1g.10gb", "1c.3g.40gb", compute="10.0"),
        parts(3, "1g.10gb", state="lost"),
    )


@pytest.mark.parametrize(
    ("wanted", "devices"),
    [
        ("1g.10gb", [(1, [1])]),
        ("3g.40gb", [(1, [0])]),
        ("1g.10gb+me", [(1, [2])]),
        ("1c.3g.40gb", [(2, [3])]),
        ("1,profile=1g.10gb", [(1, [1])]),
        ("2,profile=1g.10gb", [(1, [1]), (2, [0])]),
        ("profile=1g.10gb", [(1, [1]), (2, [0, 2])]),
        ("profile=1g.10gb,compute>=10.0", [(2, [0, 2])]),
        ("profile=1g.10gb+me,1", [(1, [2])]),
    ],
)
def test_profiles(parted, wanted, devices):
    chosen = select_gpus(parted.gpus, wanted)
    assert [(gpu.index, [device.gpu_instance for device in gpu.mig]) for gpu in chosen] == devices
    assert select_gpus(parted.gpus, make_exact_spec(chosen)) == chosen


def test_each_mig_device_of_a_profile_is_a_candidate(parted):
    choice = find_candidates(parted.gpus, "2,profile=1g.10gb")
    assert choice.count == 2
    assert [(gpu.index, gpu.mig[0].gpu_instance) for gpu in choice.gpus] == [(1, 1), (2, 0), (2, 2)]
    assert all(len(gpu.mig) == 1 for gpu in choice.gpus)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("7g.80gb", "GPUs 7g.80gb: 0 of 8 MIG devices are usable and match"),
        ("4,profile=1g.10gb", "3 of 8 MIG devices are usable and match"),
        ("profile=3g.40gb,profile=1g.10gb", "0 of 8 MIG devices"),
    ],
)
def test_a_missing_profile_is_rejected(parted, wanted, words):
    with pytest.raises(UsageError) as caught:
        select_gpus(parted.gpus, wanted)
    assert words in str(caught.value)
    assert caught.value.remedy == (
        "it has 1 x 3g.40gb; 4 x 1g.10gb; 1 x 1g.10gb+me; 1 x unknown; 1 x 1c.3g.40gb"
    )


@pytest.mark.parametrize("wanted", ["2,1g.10gb", "profile!=1g.10gb", "profile>1g.10gb"])
def test_a_profile_with_other_names_is_rejected(parted, wanted):
    with pytest.raises(UsageError, match="invalid condition") as caught:
        select_gpus(parted.gpus, wanted)
    assert "profile=1g.10gb" in caught.value.remedy


def test_the_error_on_a_node_without_mig_devices(mixed):
    with pytest.raises(UsageError) as caught:
        select_gpus(mixed.gpus, "1g.10gb")
    assert caught.value.remedy == "it has no MIG device, or NVML does not report any"


def test_a_list_has_gpus_of_the_host(node):
    first, _, third, shared, _ = node.gpus
    assert (
        select_gpus(node.gpus, [third, first])
        == select_gpus(node.gpus, (first, third, first))
        == (first, third)
    )
    part = replace(shared, mig=(B,))
    assert select_gpus(node.gpus, [part]) == (part,)
    assert select_gpus(node.gpus, [part, "3:7:0"]) == (replace(shared, mig=(B, A)),)
    assert select_gpus(node.gpus, (0, third)) == (first, third)


@pytest.mark.parametrize(
    ("wanted", "words", "remedy"),
    [
        ([], "the list of GPUs is empty", 'give "none"'),
        ((), "the list of GPUs is empty", 'give "none"'),
        (True, "invalid GPUs True", "give a count"),
        (1.0, "invalid GPUs 1.0", "give a count"),
        ({"count": 1}, "invalid GPUs {'count': 1}", "give a count"),
        ([None], "None is not a GPU", "list GPUs of the host"),
        ([True], "True is not a GPU", "list GPUs of the host"),
        ([9], "'9' not found", "it has GPU 0"),
        (["memory>=40G"], "not found", "it has GPU 0"),
    ],
)
def test_other_values_are_rejected(node, wanted, words, remedy):
    with pytest.raises(UsageError) as caught:
        select_gpus(node.gpus, wanted)
    assert words in str(caught.value)
    assert caught.value.remedy.startswith(remedy)


@pytest.mark.parametrize(
    "facts", [{"uuid": "GPU-other"}, {"index": 9}, {"state": "lost"}, {"mig": (B,)}, {"mig": ()}]
)
def test_gpus_of_another_host_are_rejected(node, facts):
    with pytest.raises(UsageError, match="is not one of these GPUs") as caught:
        select_gpus(node.gpus, [replace(node.gpus[0], **facts)])
    assert caught.value.remedy.startswith("it has GPU 0")
    with pytest.raises(UsageError, match="is not one of these GPUs"):
        select_gpus(node.gpus[:1], [node.gpus[2]])
