"""The end of a failed build's log, safe to show anywhere."""

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.build.executor.logs import (
    KEPT,
    get_log_path,
    load_dockerfile,
    open_log,
    record_dockerfile,
    shorten_log,
)
from imagematrix.common.text import make_headline, strip_escapes


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


def test_error_in_the_log_is_not_repeated(log):
    log.write_text("step\nERROR: no\n")
    assert shorten_log(log, "ERROR: no") == "step\nERROR: no"


def test_missing_error_is_appended_to_the_log(log):
    log.write_text("all went well\n")
    assert (
        shorten_log(log, "the labels promise another driver")
        == "all went well\nthe labels promise another driver"
    )


def test_error_is_shown_without_a_log(log):
    assert shorten_log(None, "nobody can tell") == "nobody can tell"
    assert shorten_log(log, "no") == f"{log}: No such file or directory\nno"


def test_long_log_is_cut_to_its_last_whole_lines(log):
    log.write_text("".join(f"line {number}\n" for number in range(100_000)))
    lines = shorten_log(log, "").split("\n")
    assert lines[-1] == "line 99999"
    assert lines[0].startswith("line ")
    assert KEPT - 20 < len("\n".join(lines)) <= KEPT


def test_endless_line_is_cut(log):
    log.write_bytes(b"x" * 3 * KEPT)
    assert shorten_log(log, "") == "x" * KEPT


def test_control_characters_are_replaced():
    assert strip_escapes("\x1b[1;31mred\x1b[0m\r\n\x1b]0;title\x07 \x00\x9b\x7f\ufffe\ud800") == (
        "red\n\ufffd]0;title\ufffd \ufffd\ufffd\ufffd\ufffd\ufffd"
    )
    assert strip_escapes("tab\tnew\nline \N{GRINNING FACE} é") == "tab\tnew\nline \N{GRINNING FACE} é"


@given(st.text(st.characters(exclude_categories=())))
def test_plain_text_is_idempotent_and_valid_xml(text):
    shown = strip_escapes(text)
    assert strip_escapes(shown) == shown
    assert not {"\x1b", "\r", "\x00", "\x9b"} & set(shown)
    element = ET.Element("a")
    element.text = shown
    assert (ET.fromstring(ET.tostring(element, encoding="utf-8")).text or "") == shown  # noqa: S314 - ours


@pytest.mark.parametrize(
    ("error", "expected"),
    [("one", "one"), ("a\nERROR: b\n\n", "ERROR: b"), ("", "failed"), ("a\r\nb\x1b[0m\r\n", "b")],
)
def test_headline_summarizes_an_error(error, expected):
    assert make_headline(error) == expected


def test_every_cell_has_its_own_log(tmp_path):
    names = [
        ("x/app", "v1", "a"),
        ("x_app", "v1", "a"),
        ("x:5000/app", "v1", "a"),
        ("x", "v1", "app-a"),
        ("x-v1", "app", "a"),
        ("x/v1-a.log", "v1", "a"),
        ("x", "v1", "a"),
    ]
    files = [get_log_path(tmp_path, *name) for name in names]
    for file in files:
        with open_log(file, print) as log:
            log.write("x")
    assert len({file.resolve() for file in files}) == len(names)


def test_longest_names_give_a_valid_log_path(tmp_path):
    image = "/".join(["a"] * 100)
    with open_log(get_log_path(tmp_path, image, "v" * 41, "c" * 73), print) as log:
        log.write("x")


def test_full_disk_error_names_the_log():
    with pytest.raises(OSError, match="/dev/full"), open_log(Path("/dev/full"), print) as log:
        log.write("x")


def test_error_in_the_log_is_recognized_despite_trailing_blanks(tmp_path):
    (tmp_path / "x").write_text("#1 RUN make   \n#1 ERROR: no\n")
    assert shorten_log(tmp_path / "x", "#1 RUN make\n#1 ERROR: no") == "#1 RUN make\n#1 ERROR: no"


def test_dockerfile_is_kept_beside_the_log(tmp_path):
    log = get_log_path(tmp_path, "ml/training", "v" * 41, "c" * 73)
    record_dockerfile(log, "FROM scratch\n")  # there is no folder, so nothing is kept
    assert load_dockerfile(log) is None
    log.parent.mkdir()
    record_dockerfile(log, "FROM scratch\r\n# ä\n")
    assert load_dockerfile(log) == "FROM scratch\r\n# ä\n"
    log.with_suffix(".Dockerfile").write_bytes(b"\xff")
    assert load_dockerfile(log) is None
