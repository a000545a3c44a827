"""The best few members: comparison with brute force, limited work, the bound."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.selection.fleet.p_median import find_median

MEMBERS = range(7)
costs = st.sampled_from([0, 0, 1, 2, 30, 1_000, 10**30])
rows = st.lists(
    st.tuples(st.dictionaries(st.sampled_from(MEMBERS), costs), st.sampled_from([1, 40, 10**31])), max_size=8
)


def solve(table, limit, **options):
    return find_median([row for row, _ in table], [nothing for _, nothing in table], limit, **options)


def cost(table, members):
    return sum(min([nothing, *(row[one] for one in members if one in row)]) for row, nothing in table)


def brute(table, limit, kept=()):
    return min(
        cost(table, some)
        for size in range(limit + 1)
        for some in combinations(MEMBERS, size)
        if {*kept} <= {*some}
    )


def scattered(count=60, members=90):
    """Return random rows, whose relaxation has a wide gap."""
    source = random.Random(1)  # noqa: S311 - no secret
    return [
        ({one: source.randint(0, 90) for one in source.sample(range(members), source.randint(1, 15))}, 10_000)
        for _ in range(count)
    ]


@given(rows, st.integers(0, 5))
def test_median_costs_as_little_as_any_choice(table, limit):
    found = solve(table, limit)
    assert found.exact
    assert found.cost == cost(table, found.members) == brute(table, limit)
    assert len(found.members) <= limit
    assert all(cost(table, found.members - {one}) > found.cost for one in found.members)


@given(rows, st.integers(0, 3), st.frozensets(st.sampled_from(MEMBERS), max_size=2))
def test_kept_members_count_and_stay(table, more, kept):
    found = solve(table, len(kept) + more, kept=kept)
    assert kept <= found.members
    assert found.cost == cost(table, found.members) == brute(table, len(kept) + more, kept)


@given(rows, st.integers(0, 5), st.integers(0, 300))
def test_little_work_gives_a_choice_and_a_bound(table, limit, work):
    found = solve(table, limit, work=work)
    assert found.cost == cost(table, found.members)
    assert found.least <= brute(table, limit) <= found.cost


def test_search_that_ends_early_is_no_worse_with_more_work():
    table = scattered()
    greedy, part, whole = (solve(table, 9, work=work) for work in (0, 300_000, 3_000_000))
    assert not greedy.exact
    assert greedy.least <= part.least <= whole.least <= whole.cost <= part.cost <= greedy.cost
    assert whole.cost < greedy.cost


def test_limit_below_the_kept_members_is_rejected():
    with pytest.raises(ValueError, match="below"):
        find_median([], [], 1, kept=[0, 1])
