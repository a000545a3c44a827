"""Slurm's files, as far as a node is concerned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.errors import UsageError
from imagematrix.integrations.slurm import configuration
from imagematrix.integrations.slurm.configuration import (
    collect_node_options,
    collect_settings,
    find_slurm_conf,
    get_features,
    is_node_in,
    parse_options,
    read_lines,
)


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
        ("n[1-99999999999]", "n5", True),
    ],
)
def test_expressions_name_nodes(expression, node, expected):
    assert is_node_in(expression, node) is expected


@given(st.text("n[]-,0123456789", max_size=20), st.text("n0123456789", max_size=12))
def test_no_expression_fails(expression, node):
    assert is_node_in(expression, node) in (True, False)


@given(st.integers(0, 999), st.integers(0, 999), st.integers(0, 1200))
def test_ranges_are_those_of_numbers(first, last, number):
    assert is_node_in(f"n[{first:03}-{last:03}]", f"n{number:03}") is (first <= number <= last)


def test_options_have_quotes_and_no_case():
    assert parse_options("RunTimeRun=\"exec /x '%b' = y\" A=b=c") == {
        "runtimerun": "exec /x '%b' = y",
        "a": "b=c",
    }
    assert parse_options("no options here") == {}


def test_the_features_of_a_node_are_found(tmp_path):
    (tmp_path / "nodes.conf").write_text("NodeName=n[1-2] Features=a,im-driver-1\nNodeName=n3 Feature=b\n")
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=x # NodeName=n1 Features=no\n"
        "NodeName=DEFAULT Features=every\n"
        "include nodes.conf\n"
        "NodeName=n9 CPUs=2 \\\n  RealMemory=3\n"
        "NodeName=n4 Features=\n"
    )
    lines = read_lines(str(tmp_path / "slurm.conf"))
    assert get_features(lines, "n1") == ("a", "im-driver-1")
    assert get_features(lines, "n3") == ("b",)
    assert get_features(lines, "n9") == ("every",)
    assert get_features(lines, "n8") == ()
    assert (collect_node_options(lines, "n9") or {})["realmemory"] == "3"
    assert collect_node_options(lines, "n8") is None
    assert collect_settings(lines)["clustername"] == "x"


def test_included_lines_stand_in_place_of_the_include(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "slurm.conf").write_text("A=1\nInclude sub/one.conf\nA=4\n")
    (tmp_path / "sub/one.conf").write_text("A=2\ninclude two.conf\n")
    (tmp_path / "sub/two.conf").write_text("A=3")
    assert read_lines(str(tmp_path / "slurm.conf")) == ["A=1", "A=2", "A=3", "A=4"]


def test_files_are_bounded(tmp_path, monkeypatch):
    path = tmp_path / "slurm.conf"
    path.write_text("include slurm.conf\n")
    with pytest.raises(UsageError, match="includes more than"):
        read_lines(str(path))
    path.write_text("A=1\n")
    monkeypatch.setattr(configuration, "LIMIT", 3)
    with pytest.raises(UsageError, match="too large"):
        read_lines(str(path))
    monkeypatch.setattr(configuration, "LIMIT", 4)
    assert read_lines(str(path)) == ["A=1"]
    with pytest.raises(UsageError, match="cannot be read"):
        read_lines(str(tmp_path / "missing"))
    path.write_text("include\n")
    monkeypatch.setattr(configuration, "LIMIT", 100)
    assert read_lines(str(path)) == ["include"]


def test_slurmd_s_variable_comes_first(tmp_path, monkeypatch):
    own, usual = tmp_path / "own.conf", tmp_path / "slurm.conf"
    monkeypatch.setattr(configuration, "PLACES", (str(usual),))
    assert find_slurm_conf({}) is None
    usual.touch()
    assert find_slurm_conf({"SLURM_CONF": str(own)}) == str(usual)
    own.touch()
    assert find_slurm_conf({"SLURM_CONF": str(own)}) == str(own)
