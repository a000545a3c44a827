"""Text that is safe to print, and lists of which only the first words are shown."""

import pytest

from imagematrix import errors
from imagematrix.common import text

HOSTILE = "a\x1b[31mb\x00\x9b\u202ec\ud800\ufffe\td\n"


def test_terminals_obey_no_character():
    assert errors.sanitize_text(HOSTILE) == "a�[31mb���c\ud800\ufffe\td\n"
    assert errors.sanitize_line(HOSTILE) == "a�[31mb���c\ud800\ufffe�d�"


def test_reports_have_neither_colours_nor_what_xml_excludes():
    assert text.strip_escapes(f"{HOSTILE}\r\n") == "ab���c��\td\n\n"


@pytest.mark.parametrize(
    ("words", "shown"), [([], ""), (["a", "b"], "a, b"), (["a", "b", "c", "d"], "a, b and 2 more")]
)
def test_words_that_are_not_shown_are_counted(words, shown):
    assert text.shorten_words(words, 2) == shown


def test_a_list_has_a_line_for_each_word():
    assert text.shorten_lines(["a", "b", "c"], 1) == ["  a", "  and 2 more"]
    assert text.shorten_lines(["a", "b"], 2, indent="") == ["a", "b"]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("::error::x", "\ufffd:error::x"),
        ("a\n\u3000 ::error::x", "a\n\u3000 \ufffd:error::x"),
        ("a ::warning::x", "a \ufffd:warning::x"),
        (":::x", "\ufffd::x"),
        ("std::string ::", "std::string ::"),
        ("##[error]x ###[x]", "\ufffd#[error]x #\ufffd#[x]"),
        ("x##vso[task.x]##teamcity[y]", "x\ufffd#vso[task.x]\ufffd#teamcity[y]"),
        ("## [x] #[y] ${v##*/}", "## [x] #[y] ${v##*/}"),
        ("#\x1b[1m#[x]", "#\ufffd[1m#[x]"),
    ],
)
def test_ci_systems_obey_no_word(said, shown):
    assert errors.sanitize_text(said) == shown
    assert errors.sanitize_line(said) == shown.replace("\n", "\ufffd")
    assert errors.sanitize_line(errors.sanitize_line(said)) == errors.sanitize_line(said)


def test_no_command_appears_where_colours_are_removed():
    assert text.strip_escapes("#\x1b[1m#[x] :\x1b[m:x") == "\ufffd#[x] \ufffd:x"


def test_a_line_has_no_line_breaks_of_unicode():
    assert errors.sanitize_line("a\u2028b\u2029c\x85d") == "a\ufffdb\ufffdc\ufffdd"
