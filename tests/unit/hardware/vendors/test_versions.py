from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.hardware.vendors import versions

PARTS = st.lists(st.integers(0, 999), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("version", "order"),
    [("580.65.06", (580, 65, 6)), ("384.81", (384, 81)), ("12.4", (12, 4)), ("9", (9,))],
)
def test_order_is_a_tuple_of_integers(version, order):
    assert versions.make_sort_key(version) == order


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("550.54.14", "550.163.01"),
        ("570.26", "570.86.10"),
        ("450.80", "450.80.02"),
        ("12.9", "12.10"),
        ("525.85.12", "1000.1"),
    ],
)
def test_newer_versions_come_later(older, newer):
    assert versions.make_sort_key(older) < versions.make_sort_key(newer)


def test_equal_order_is_not_equality():
    assert versions.make_sort_key("580.65.06") == versions.make_sort_key("580.65.6")


@given(PARTS, st.integers(0, 3))
def test_leading_zeros_are_ignored(parts, zeros):
    assert versions.make_sort_key(".".join("0" * zeros + str(part) for part in parts)) == tuple(parts)


@given(PARTS, PARTS)
def test_order_is_total(first, second):
    ours = versions.make_sort_key(".".join(map(str, first))) < versions.make_sort_key(
        ".".join(map(str, second))
    )
    assert ours == (first < second)


@pytest.mark.parametrize("text", ["", "550.", "550.x", "R550"])
def test_invalid_version_is_rejected(text):
    with pytest.raises(ValueError, match="invalid literal"):
        versions.make_sort_key(text)


@pytest.mark.parametrize(("driver", "branch"), [("550.163.01", 550), ("384.81", 384), ("1000.10", 1000)])
def test_branch_of_a_driver(driver, branch):
    assert versions.get_branch(driver) == branch
