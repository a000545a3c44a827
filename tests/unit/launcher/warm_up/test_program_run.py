"""What a start of a program leaves, as far as no engine is needed to tell."""

import pytest

from imagematrix.launcher.warm_up import program_run
from imagematrix.launcher.warm_up.program_run import list_outside, read_lines


def test_lines_are_whole_whatever_the_pieces_are():
    lines: list[str] = []
    last = read_lines([b"on", b"e\ntwo\nth", b"ree \xff"], lines.append)
    assert lines == ["one", "two", "three \ufffd"]
    assert last == ("one", "two", "three \ufffd")


def test_of_the_output_the_last_lines_are_kept(monkeypatch):
    monkeypatch.setattr(program_run, "LAST_LINES", 2)
    assert read_lines([b"1\n2\n3\n4\n"], lambda _: None) == ("3", "4")


@pytest.mark.parametrize("pieces", [[b"x" * 100], [b"xxxx", b"x" * 10, b"xx\ny"]])
def test_a_long_line_is_cut(monkeypatch, pieces):
    monkeypatch.setattr(program_run, "LONGEST_LINE", 5)
    assert read_lines(pieces, lambda _: None)[0] == "xxxxx"


def test_what_is_written_elsewhere_is_told_without_its_folders():
    written = ["/tmp", "/tmp/a", "/var", "/var/cache", "/var/cache/warm/x", "/models/m", "/empty", "/vary"]
    assert list_outside(written, ["/models/m"]) == ("/empty", "/tmp/a", "/vary")
