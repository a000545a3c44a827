"""Text that is safe to print, and lists of which only the first words are shown."""

import pytest

from imagematrix import text

HOSTILE = "a\x1b[31mb\x00\x9b\u202ec\ud800\ufffe\td\n"


def test_terminals_obey_no_character():
    assert text.visible(HOSTILE) == "a�[31mb���c\ud800\ufffe\td\n"
    assert text.line(HOSTILE) == "a�[31mb���c\ud800\ufffe�d�"


def test_reports_have_neither_colours_nor_what_xml_excludes():
    assert text.plain(f"{HOSTILE}\r\n") == "ab���c��\td\n\n"


@pytest.mark.parametrize(
    ("words", "shown"), [([], ""), (["a", "b"], "a, b"), (["a", "b", "c", "d"], "a, b and 2 more")]
)
def test_words_that_are_not_shown_are_counted(words, shown):
    assert text.shortened(words, 2) == shown


def test_a_list_has_a_line_for_each_word():
    assert text.shortened(["a", "b", "c"], 1, "\n", "\nand {} more") == "a\nand 2 more"
