"""The smallest cover: known results, comparison with brute force, limited work."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.selection.fleet import set_cover as module
from imagematrix.selection.fleet.set_cover import Cover, find_cover
from imagematrix.selection.variant_index import split_mask

rows = st.lists(st.integers(1, 2**9 - 1), max_size=14)


def numbers(some):
    return [member.bit_length() - 1 for member in split_mask(some)]


def sets(*rows):
    return [sum(1 << number for number in row) for row in rows]


def brute(demands, members=9):
    for size in range(members + 1):
        for some in combinations(range(members), size):
            chosen = sum(1 << number for number in some)
            if all(chosen & row for row in demands):
                return size
    raise AssertionError


def cycle(length):
    """Return rows that each share a member with the next; a smallest cover has half of the members."""
    return sets(*((place, (place + 1) % length) for place in range(length)))


def scattered(count, members, *, size=6):
    """Return random rows, which no reduction simplifies."""
    source = random.Random(1)  # noqa: S311 - no secret
    return sets(*(source.sample(range(members), source.randint(2, size)) for _ in range(count)))


@pytest.mark.parametrize(
    ("demands", "expected"),
    [
        ([], []),
        ([[3]], [3]),
        ([[0, 1], [1, 2]], [1]),
        ([[0, 1], [0, 1, 2], [0, 1]], [0]),
        ([[0], [1]], [0, 1]),
        ([[0, 1], [2, 3]], [0, 2]),
        # the greedy choice, 4, is in no smallest cover
        ([[0, 4], [0, 4], [0, 5], [1, 4], [1, 4, 6], [1, 5]], [0, 1]),
        ([[5, 7], [6, 7], [8]], [7, 8]),
    ],
)
def test_cover_of_small_tables(demands, expected):
    result = find_cover(sets(*demands))
    assert numbers(result.members) == expected
    assert result.exact
    assert result.least == len(expected)


def test_empty_demand_is_rejected():
    with pytest.raises(ValueError, match="empty demand"):
        find_cover([1, 0])


@given(rows)
def test_cover_is_complete_and_minimal(demands):
    result = find_cover(demands)
    assert all(result.members & row for row in demands)
    assert result.exact
    assert result.members.bit_count() == brute(demands)


@given(rows, st.randoms())
def test_order_and_duplicates_do_not_matter(demands, source):
    again = demands + demands[:3]
    source.shuffle(again)
    assert find_cover(again) == find_cover(demands)


@given(rows, st.integers(0, 200))
def test_cover_with_little_work_is_complete(demands, work):
    result = find_cover(demands, work=work)
    assert all(result.members & row for row in demands)
    assert result.least <= brute(demands) <= result.members.bit_count()


@pytest.mark.parametrize("length", [3, 4, 5, 9, 40, 101])
def test_cycle_is_solved_by_search(length):
    assert find_cover(cycle(length)).members.bit_count() == (length + 1) // 2


def test_independent_parts_are_solved_separately():
    copies = [row << shift for shift in range(0, 400, 20) for row in cycle(7)]
    result = find_cover(copies)
    assert (result.members.bit_count(), result.exact) == (20 * 4, True)


def test_incomplete_search_is_not_exact():
    demands = scattered(120, 40)
    whole, greedy, part = (find_cover(demands, work=work) for work in (module.WORK, 0, 40_000))
    assert whole.exact
    assert not greedy.exact
    assert greedy.least < whole.least
    assert whole.members.bit_count() <= part.members.bit_count() <= greedy.members.bit_count()
    assert all(part.members & row for row in demands)


def test_search_depth_is_limited(monkeypatch):
    monkeypatch.setattr(module, "DEEPEST", 2)
    demands = scattered(120, 40)
    result = find_cover(demands)
    assert not result.exact
    assert all(result.members & row for row in demands)


def test_greedy_cover_that_meets_the_bound_is_exact():
    assert find_cover(sets([0, 1], [2, 3]), work=0) == Cover(members=0b101, least=2)
