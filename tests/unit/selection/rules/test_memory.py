"""Both sides of every boundary of the rule `memory`."""

from __future__ import annotations

import pytest

from imagematrix.common.record import replace
from imagematrix.hardware.host.host import MigDevice
from imagematrix.selection.candidate import evaluate_rules
from imagematrix.selection.selection import NothingFits
from imagematrix.selection.selection_target import Target
from imagematrix.selection.selector import explain, select


def mig(*sizes):
    return tuple(
        MigDevice(
            uuid=f"MIG-{number}", profile=None, gpu_instance=number, compute_instance=0, memory_mib=size
        )
        for number, size in enumerate(sizes)
    )


@pytest.mark.parametrize(
    ("facts", "ok"),
    [
        ([{"memory_mib": 16384}], True),
        ([{"memory_mib": 16383}], False),
        ([{"memory_mib": 46068}, {"memory_mib": 16384}], True),
        ([{"memory_mib": 46068}, {"memory_mib": 15360}], False),
        ([{"memory_mib": None}], False),
        ([{"memory_mib": 46068}, {"memory_mib": None}], False),
        ([{"memory_mib": 0}], False),
        # A MIG device has its own memory, and not that of its GPU.
        ([{"memory_mib": 81559, "mig": mig(40448)}], True),
        ([{"memory_mib": 81559, "mig": mig(40448, 9984)}], False),
        ([{"memory_mib": 81559, "mig": mig(40448, None)}], False),
        ([{"memory_mib": None, "mig": mig(16384)}], True),
        # Of a GPU that shares the CPUs' memory, all of it counts.
        ([{"memory_mib": 124610, "memory_shared": True}], True),
        ([], True),
    ],
)
def test_every_gpu_needs_the_memory_that_is_stated(judge, make, facts, ok):
    gpus = [make.gpu(index, **one) for index, one in enumerate(facts)]
    result = judge("memory", make.host(*gpus), make.variant(gpu_memory_mib=16384))
    assert result.ok is ok
    assert result.need == "16384 MiB"


def test_an_image_that_states_nothing_needs_no_known_memory(make):
    results = evaluate_rules(Target(host=make.host(make.gpu()), gpus=(make.gpu(),)), make.variant())
    assert "memory" not in {result.rule for result in results}


def test_the_reason_names_the_smallest_gpu(judge, make):
    host = make.host(make.gpu(0, memory_mib=23034), make.gpu(1, memory_mib=15360))
    result = judge("memory", host, make.variant(gpu_memory_mib=24576))
    assert result.why == "it needs 24576 MiB of GPU memory, and GPU 1 (NVIDIA L40S) has 15360 MiB"
    assert result.have == "15360 MiB"
    assert result.fix == "pass a GPU with more memory, or build a variant that needs less"
    held = judge("memory", host, make.variant(gpu_memory_mib=15360))
    assert held.why == "every GPU that is passed has 15360 MiB of memory or more"
    assert held.have == "15360 MiB"


def test_unknown_memory_has_a_remedy(judge, make):
    host = make.host(make.gpu(0, memory_mib=46068), make.gpu(1))
    result = judge("memory", host, make.variant(gpu_memory_mib=24576))
    assert result.have is None
    assert result.why.endswith("and the memory of GPU 1 (NVIDIA L40S) is unknown")
    assert result.fix == "pass gpus='device=0'"  # the other one is large enough
    alone = judge("memory", make.host(make.gpu()), make.variant(gpu_memory_mib=24576))
    assert "libnvidia-ml.so.1" in alone.fix
    assert "--nvidia-smi FILE" in alone.fix


@pytest.mark.parametrize(
    ("total", "share", "ok"),
    [
        (46068, 16384, True),
        (46068, 16383, False),
        (15360, 16384, False),
        (None, 16384, True),
        (46068, None, True),
    ],
)
def test_of_a_share_its_own_memory_counts(make, total, share, ok):
    host, catalog = make.host(make.gpu(memory_mib=total)), make.catalog(make.variant(gpu_memory_mib=16384))
    answer = explain(host, catalog, vram_mib=share)
    assert bool(answer.selected) is ok
    assert answer.decision.target.vram_mib == share
    if total == 46068 and not ok:
        with pytest.raises(NothingFits, match="and the share has 16383 MiB") as caught:
            select(host, catalog, vram_mib=share)
        assert caught.value.remedy == "pass --vram 16384Mi or more"


def test_decisions_are_kept_apart_by_the_share(make):
    host, catalog = make.host(make.gpu(memory_mib=46068)), make.catalog(make.variant(gpu_memory_mib=16384))
    answers = [explain(host, catalog, vram_mib=share) for share in (None, 8192, None, 16384)]
    assert [bool(answer.selected) for answer in answers] == [True, False, True, True]
    assert answers[0].decision is answers[2].decision
    assert len({answer.decision for answer in answers}) == 3


def test_gpus_that_a_count_leaves_out_need_nothing(make):
    small, large = make.gpu(0, memory_mib=15360), make.gpu(1, memory_mib=46068)
    catalog = make.catalog(make.variant(gpu_memory_mib=16384))
    assert select(make.host(small, large), catalog, gpus=1).gpus == ("GPU-1",)
    with pytest.raises(NothingFits, match=r"with all the GPUs passed; it fits GPU 1") as caught:
        select(make.host(small, large), catalog)
    assert caught.value.remedy == "pass gpus='device=1'"


def test_a_mig_device_is_passed_if_it_is_large_enough(make):
    host = make.host(make.gpu(memory_mib=81559, mig=mig(9984, 40448)))
    catalog = make.catalog(make.variant(gpu_memory_mib=16384))
    assert select(host, catalog, gpus="MIG-1").gpus == ("MIG-1",)
    with pytest.raises(NothingFits, match="has 9984 MiB"):
        select(host, catalog, gpus="MIG-0")


def test_another_value_of_an_axis_that_needs_less_is_the_remedy(make):
    host = make.host(make.gpu(memory_mib=15360))
    large, small, least = (
        make.variant(f"t:{name}", gpu_memory_mib=size, axes=(("precision", name),))
        for name, size in (("fp16", 24576), ("int8", 13000), ("int4", 7000))
    )
    catalog = replace(
        make.catalog(large, least, small),
        defaults=(("precision", "fp16"),),
        default_order=(("precision", ("fp16", "int8", "int4")),),
    )
    refused = explain(host, catalog).candidates[-1]
    assert refused.reference == "t:fp16"
    (result,) = refused.failing
    assert result.fix == "pass where={'precision': 'int8'}"  # the next one, not the one that needs least
    assert result.to_json()["fix"] == "pass --where precision=int8"
    assert result.change == {"option": "--where precision=int8"}
    # The same if the question names the value.
    with pytest.raises(NothingFits, match="t:int8 fits, but was not requested") as caught:
        select(host, catalog, where="precision=fp16")
    assert caught.value.shown == "pass --where precision=int8"
