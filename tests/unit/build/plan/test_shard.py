"""Shards: deterministic, balanced, and each cell in exactly one."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrices import add_key

from imagematrix.build.plan.plan import DropStatus, PlanStatus
from imagematrix.build.plan.shard import Shard, partition_cells, select_shard
from imagematrix.build.reports.outcome import compute_durations, parse_report
from imagematrix.errors import UsageError

WEIGHTS = st.lists(st.floats(0, 1e6, allow_subnormal=False), max_size=40).map(
    lambda weights: {f"cell{number}": weight for number, weight in enumerate(weights)}
)
COUNTS = st.integers(1, 12)
TWO_IMAGES = add_key("  base:\n    version: v7\n    template: training.j2")


def document(*cells):
    """Return a Build document with `cells`, each (image, cell, seconds)."""
    return {
        "schema": "imagematrix.build/v1",
        "cells": [
            {"image": image, "version": "v1", "cell": cell, "status": "built", "seconds": seconds}
            for image, cell, seconds in cells
        ],
    }


def loads(weights, parts, count):
    result = [0.0] * count
    for cell, number in parts.items():
        result[number - 1] += weights[cell]
    return result


def test_valid_shards_are_parsed():
    assert str(Shard.parse("2/8")) == "2/8"
    assert Shard.parse("1/1") == Shard(number=1, count=1)


@pytest.mark.parametrize(
    "text", ["", "0/8", "9/8", "1", "1/0", "a/b", "-1/2", "1/2/3", " 1/2", "1/99999", "٣/٤"]
)
def test_invalid_shard_is_rejected(text):
    with pytest.raises(UsageError, match="invalid shard") as caught:
        Shard.parse(text)
    assert "1/8 is the first of eight" in caught.value.remedy


@given(WEIGHTS, COUNTS)
def test_every_cell_is_in_one_shard_and_no_shard_is_idle(weights, count):
    parts = partition_cells(weights, count)
    assert parts.keys() == weights.keys()
    assert set(parts.values()) <= set(range(1, count + 1))
    if all(weights.values()):
        assert len(set(parts.values())) == min(count, len(weights))


@given(WEIGHTS.filter(bool), COUNTS)
def test_no_shard_exceeds_a_fair_share_by_more_than_a_cell(weights, count):
    longest = max(loads(weights, partition_cells(weights, count), count))
    fair = sum(weights.values()) / count
    assert longest <= (fair + (1 - 1 / count) * max(weights.values())) * (1 + 1e-9)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=7), st.integers(2, 3))
def test_partition_is_within_a_third_of_the_optimum(seconds, count):
    weights = {str(number): float(weight) for number, weight in enumerate(seconds)}
    best = min(
        max(loads(weights, dict(zip(weights, numbers, strict=True)), count))
        for numbers in itertools.product(range(1, count + 1), repeat=len(weights))
    )
    longest = max(loads(weights, partition_cells(weights, count), count))
    assert longest <= (4 / 3 - 1 / (3 * count)) * best + 1e-9


def test_ties_follow_matrix_order():
    assert partition_cells(dict.fromkeys("abcde", 1.0), 2) == {"a": 1, "b": 2, "c": 1, "d": 2, "e": 1}
    assert partition_cells({"a": 1, "b": 5, "c": 1, "d": 1}, 2) == {"b": 1, "a": 2, "c": 2, "d": 2}
    assert partition_cells(dict.fromkeys("abc", 0.0), 2) == {"a": 1, "b": 2, "c": 1}


@given(
    st.lists(
        st.lists(st.tuples(st.just("training"), st.sampled_from("abc"), st.floats(0, 1e6)), max_size=4),
        max_size=4,
    ),
    st.randoms(),
)
def test_record_order_does_not_matter(cells, random):
    reports = [parse_report(document(*some), "x") for some in cells]
    shuffled = list(reports)
    random.shuffle(shuffled)
    assert compute_durations(reports) == compute_durations(shuffled)


def test_only_built_cells_have_a_duration():
    some = document(("training", "a", 3), ("training", "b", 0.1), ("base", "a", 9))
    some["cells"][1]["status"] = "failed"
    more = document(("training", "a", 5))
    assert compute_durations([parse_report(some, "x"), parse_report(more, "x")]) == {
        ("training", "a"): 4,
        ("base", "a"): 9,
    }


def test_shard_plan_names_the_shards_of_other_cells(planned, conforms):
    whole = planned()
    shards = [select_shard(whole, Shard(number=number, count=3), {}) for number in (1, 2, 3)]
    for shard in shards:
        conforms(shard.to_json())
        assert len(shard.items) == len(whole.items)
        assert len(shard.with_status(PlanStatus.BUILD)) == 4
        assert [shard.list_dropped(status) for status in DropStatus] == [
            whole.list_dropped(status) for status in DropStatus
        ]
    ours = [item.cell.id for shard in shards for item in shard.with_status(PlanStatus.BUILD)]
    assert sorted(ours) == sorted(item.cell.id for item in whole.with_status(PlanStatus.BUILD))
    assert [shard.shard for shard in shards] == ["1/3", "2/3", "3/3"]


def test_images_of_other_shards_move_no_cell(planned, backend):
    before = select_shard(planned(), Shard(number=2, count=3), {})
    theirs = before.with_status(PlanStatus.BUILD)[0]
    backend.images[theirs.reference] = {
        "io.imagematrix.image": "training",
        "io.imagematrix.version": "v1",
        "io.imagematrix.cell": theirs.cell.id,
        "io.imagematrix.input": theirs.identity.digest,
        "io.imagematrix.inputs": "{}",
    }
    after = select_shard(planned(), Shard(number=2, count=3), {})
    assert after.with_status(PlanStatus.OTHER_SHARD) == before.with_status(PlanStatus.OTHER_SHARD)
    assert [item.cell.id for item in after.with_status(PlanStatus.UP_TO_DATE)] == [theirs.cell.id]


def test_all_images_of_a_cell_share_a_shard(planned):
    whole = planned(TWO_IMAGES)
    assert len(whole.with_status(PlanStatus.BUILD)) == 24
    seen: set[str] = set()
    for number in (1, 2, 3):
        ours = select_shard(whole, Shard(number=number, count=3), {}).with_status(PlanStatus.BUILD)
        cells = {item.cell.id for item in ours}
        assert len(ours) == 2 * len(cells)
        assert not cells & seen
        seen |= cells
    assert len(seen) == 12


def test_unknown_durations_count_as_the_median(planned):
    whole = planned()
    cells = [item.cell.id for item in whole.with_status(PlanStatus.BUILD)]
    seconds = {("training", cells[5]): 1000.0, ("training", cells[1]): 10.0, ("training", cells[2]): 20.0}
    first = select_shard(whole, Shard(number=1, count=2), seconds)
    assert [item.cell.id for item in first.with_status(PlanStatus.BUILD)] == [cells[5]]
