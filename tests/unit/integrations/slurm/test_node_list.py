"""Lists of nodes, as the files and the variables of Slurm have them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.integrations.slurm.node_list import NODES, expand_node_list


@pytest.mark.parametrize(
    ("expression", "node", "expected"),
    [
        ("n1", "n1", True),
        ("n1", "n10", False),
        ("n[1-3,7]", "n2", True),
        ("n[1-3,7]", "n7", True),
        ("n[1-3,7]", "n4", False),
        ("n[01-16]", "n09", True),
        ("n[01-16]", "n9", False),
        ("n[01-16]", "n17", False),
        ("n[8-12]", "n10", True),
        ("n[8-12]", "n010", False),
        ("gpu[1-2],cpu[1-4],login", "cpu3", True),
        ("gpu[1-2],cpu[1-4],login", "login", True),
        ("r[1-2]n[1-4]", "r2n4", True),
        ("r[1-2]n[1-4]", "r3n4", False),
        ("n[1-3]-ib", "n2-ib", True),
        ("n.1", "nx1", False),
        ("", "n1", False),
        ("n[]", "n1", False),
        ("n[3-]", "n3", False),
        ("n[-3]", "n3", False),
        ("n[a-b]", "na", False),
        ("n[1-3", "n1", False),
        ("n[3-1]", "n2", False),
        ("n[1-3][3-1]", "n1", False),
        ("n[1-3][3-]", "n1", False),
        ("n[1-3,a", "a", True),
        (f"n{'[1]' * 8}", "n11111111", True),
        (f"n{'[1]' * 9}", "n111111111", False),
        (f"n{'[1]' * 1500}", "n1", False),
        ("n[1-99999999999]", "n5", True),
    ],
)
def test_expressions_name_nodes(expression, node, expected):
    assert (node in expand_node_list(expression)) is expected


def test_list_of_nothing_has_an_end():
    """Each of the loops over 10^10 names would run without one."""
    names = [*expand_node_list("n[1-100000][1-100000][2-1]")]
    assert len(names) == NODES + 1
    assert all(name.endswith("[2-1]") for name in names)


@given(st.text("n[]-,0123456789", max_size=20), st.text("n0123456789", max_size=12))
def test_no_expression_fails(expression, node):
    assert (node in expand_node_list(expression)) in (True, False)


@given(st.integers(0, 999), st.integers(0, 999), st.integers(0, 1200))
def test_ranges_are_those_of_numbers(first, last, number):
    assert (f"n{number:03}" in expand_node_list(f"n[{first:03}-{last:03}]")) is (first <= number <= last)
