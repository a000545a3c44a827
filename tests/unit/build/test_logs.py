"""The end of a failed build's log, fit to be shown anywhere."""

from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.build.logs import KEPT, headline, plain, said


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


def test_a_log_that_has_the_error_is_enough(log):
    log.write_text("step\nERROR: no\n")
    assert said(log, "ERROR: no") == "step\nERROR: no"


def test_an_error_that_the_log_lacks_comes_after_it(log):
    log.write_text("all went well\n")
    assert (
        said(log, "the labels promise another driver") == "all went well\nthe labels promise another driver"
    )


def test_without_a_log_there_is_the_error(log):
    assert said(None, "nobody can tell") == "nobody can tell"
    assert said(log, "no") == f"{log}: No such file or directory\nno"


def test_of_a_long_log_there_are_the_last_whole_lines(log):
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))
    lines = said(log, "").split("\n")
    assert lines[-1] == "line 99999"
    assert lines[0].startswith("line ")
    assert KEPT - 20 < len("\n".join(lines)) <= KEPT


def test_a_line_without_an_end_is_cut(log):
    log.write_bytes(b"x" * 3 * KEPT)
    assert said(log, "") == "x" * KEPT


def test_no_control_gets_through():
    assert plain("\x1b[1;31mred\x1b[0m\r\n\x1b]0;title\x07 \x00\x9b\x7f\ufffe\ud800") == (
        "red\n\ufffd]0;title\ufffd \ufffd\ufffd\ufffd\ufffd\ufffd"
    )
    assert plain("tab\tnew\nline \N{GRINNING FACE} é") == "tab\tnew\nline \N{GRINNING FACE} é"


@given(st.text(st.characters(exclude_categories=())))
def test_what_is_plain_is_xml_and_stays_plain(text):
    shown = plain(text)
    assert plain(shown) == shown
    assert not {"\x1b", "\r", "\x00", "\x9b"} & set(shown)
    element = ET.Element("a")
    element.text = shown
    assert (ET.fromstring(ET.tostring(element, encoding="utf-8")).text or "") == shown  # noqa: S314 - ours


@pytest.mark.parametrize(
    ("error", "expected"),
    [("one", "one"), ("a\nERROR: b\n\n", "ERROR: b"), ("", "failed"), ("a\r\nb\x1b[0m\r\n", "b")],
)
def test_an_error_in_one_line(error, expected):
    assert headline(error) == expected
