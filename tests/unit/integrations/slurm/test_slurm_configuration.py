"""Slurm's files, as far as a node is concerned."""

import pytest

from imagematrix.errors import UsageError
from imagematrix.integrations.slurm import configuration
from imagematrix.integrations.slurm.configuration import (
    collect_node_options,
    collect_settings,
    find_slurm_conf,
    get_features,
    parse_options,
    read_lines,
)


def test_options_have_quotes_and_no_case():
    assert parse_options("RunTimeRun=\"exec /x '%b' = y\" A=b=c") == {
        "runtimerun": "exec /x '%b' = y",
        "a": "b=c",
    }
    assert parse_options("no options here") == {}
    assert parse_options("1a=b") == {}


def test_a_line_has_several_settings():
    lines = ["KillOnBadExit=1 GresTypes=gpu", "NodeName=n1 CPUs=2"]
    assert {"killonbadexit": "1", "grestypes": "gpu"}.items() <= collect_settings(lines).items()


@pytest.mark.parametrize("character", ["\u2028", "\x85", "\x1c"])
def test_only_line_feeds_end_lines(tmp_path, character):
    path = tmp_path / "slurm.conf"
    path.write_text(f"Reason=a{character}NodeName=n1 Features=b\nA=1\n", encoding="utf-8")
    assert get_features(read_lines(str(path)), "n1") == ()


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
    # Also the names in included files are beside slurm.conf.
    (tmp_path / "sub/one.conf").write_text("A=2\ninclude two.conf\n")
    (tmp_path / "two.conf").write_text("A=3")
    (tmp_path / "sub/two.conf").write_text("A=9")
    assert read_lines(str(tmp_path / "slurm.conf")) == ["A=1", "A=2", "A=3", "A=4"]


def test_included_names_have_the_name_of_the_cluster(tmp_path):
    """In lower case, as Slurm has it (_parse_for_format in src/common/parse_config.c)."""
    path = tmp_path / "slurm.conf"
    path.write_text("ClusterName=Big\nInclude %c/%c.conf\n")
    (tmp_path / "big").mkdir()
    (tmp_path / "big/big.conf").write_text("A=1\n")
    assert read_lines(str(path)) == ["ClusterName=Big", "A=1"]
    path.write_text("Include %c.conf\nClusterName=Big\n")
    with pytest.raises(UsageError, match=r"includes %c\.conf before ClusterName"):
        read_lines(str(path))


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
