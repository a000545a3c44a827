"""What a start of a program leaves, as far as no engine is needed to tell."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from counting import counted

import imagematrix
from imagematrix.common.record import replace
from imagematrix.images.catalog.warm_up import WarmUp
from imagematrix.launcher.launch_session import UnusedGpus
from imagematrix.launcher.warm_up import program_run
from imagematrix.launcher.warm_up.program_run import WarmUpStart, list_outside, read_lines

PACKAGE = Path(imagematrix.__file__).parent


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


def test_the_depth_of_a_folder_does_not_count_for_each_file_in_it():
    folder = "/tmp" + "/a" * 1900

    def count(files):
        written = [f"{folder}/{number}" for number in range(files)]
        return counted(partial(list_outside, written, ()), PACKAGE).total()

    assert count(200) - count(100) < 1900 * 10


@pytest.mark.parametrize(("usable", "expected"), [(2, [3, 5]), (4, [3, 5, 7]), (None, [3, 5, 7])])
def test_a_program_runs_on_as_many_cpus_as_a_quota_allows(make, monkeypatch, usable, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {7, 3, 5})
    host = make.host()
    host = replace(host, cpu=replace(host.cpu, usable=usable))
    request: Any = SimpleNamespace(host=host)
    start = WarmUpStart(request=request, gpus=UnusedGpus(), warm_up=WarmUp(command=("x",)), folders={})
    assert start.cpus == expected
