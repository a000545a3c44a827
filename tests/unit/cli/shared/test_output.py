"""Untrusted text cannot control the terminal; tables are as rich would print them."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.markup import escape

from imagematrix.cli.shared import output
from imagematrix.common import json_documents
from imagematrix.errors import ImagematrixError, UsageError, sanitize_text

# Window title, colours, their C1 forms, clearing the screen, and right-to-left text.
HOSTILE = "a\x1b]0;b\x07\x1b[31mc\x9b2J\x9dd\r\x08\x7f\u202ee\u2066f"
OBEYED = {letter for letter in HOSTILE if not letter.isalnum() and letter not in "]0;[312J"}


def is_safe(text):
    return not OBEYED & set(text) and "a" in text and "f" in text


def test_hostile_text_in_messages_is_escaped(capsys):
    output.print_info(HOSTILE)
    output.warn(HOSTILE, HOSTILE)
    output.print_error(ImagematrixError(HOSTILE, remedy=HOSTILE))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert all(map(is_safe, lines))


def test_own_colours_are_kept(capsys, monkeypatch):
    monkeypatch.setattr(output, "_is_coloured", lambda _: True)
    output.warn(HOSTILE)
    begin = "\x1b[33mimagematrix:\x1b[0m "
    result = capsys.readouterr().err
    assert result.startswith(begin)
    assert is_safe(result.removeprefix(begin))
    output.print_info_raw("\x1b[0Ksection")
    assert capsys.readouterr().err == "\x1b[0Ksection\n"


def test_hostile_text_in_tables_is_escaped(capsys):
    output.print_text(HOSTILE)
    output.print_table(("one", "two"), [(HOSTILE, "x"), (("two", "lines\n::x"), "\t")])
    output.make_console(sys.stdout).print(HOSTILE)
    out = capsys.readouterr().out
    assert not OBEYED & set(out)
    assert out.count("\N{REPLACEMENT CHARACTER}") >= 3
    assert "lines" in out


def test_hostile_text_in_documents_is_escaped(capsys):
    output.print_json({"name": HOSTILE, "plain": "\u00e9\u4e2d"})
    out = capsys.readouterr().out
    assert not OBEYED & set(out)
    assert json.loads(out) == {"name": HOSTILE, "plain": "\u00e9\u4e2d"}
    assert "\u00e9\u4e2d" in out
    assert json_documents.dump_json(["\x7f"]) == '[\n  "\\u007f"\n]\n'


def test_commands_to_ci_systems_are_escaped_in_documents(capsys):
    document = {"name": "##[error]x ##vso[y] ###[z]", "::error::": ["::error::x"]}
    output.print_json(document)
    out = capsys.readouterr().out
    assert not re.search(r"##\w*\[", out)
    assert json.loads(out) == document


@pytest.mark.parametrize("text", ["a\n  ::error::x\n", "##[error]x\n", "x\x1b[31m", "a\rb"])
def test_a_document_that_would_be_obeyed_is_refused(capsys, text):
    with pytest.raises(UsageError, match=r"^line \d of the answer has words that") as caught:
        output.print_document(text, "write it to a file")
    assert caught.value.remedy == "write it to a file"
    output.print_document("RUN a=${b##*/}; std::x\t\n")
    assert capsys.readouterr().out == "RUN a=${b##*/}; std::x\t\n"


def test_line_breaks_and_tabs_are_kept():
    assert sanitize_text("a\tb\nc \u00e9") == "a\tb\nc \u00e9"


TEXT = st.text("ab [](/)\\\u65e5\x07-", max_size=8)
CELLS = st.one_of(TEXT.map(escape), TEXT.map(lambda text: f"[green]{escape(text)}[/green]"))


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=5))
def test_a_wide_table_is_the_same_without_rich(rows):
    columns = ("one", "two words", "")
    ours, richs = io.StringIO(), io.StringIO()
    output.print_table(columns, rows, stream=ours)
    output._print_folded(columns, rows, output.make_console(richs))
    assert ours.getvalue() == richs.getvalue()


def test_a_table_is_folded_where_the_terminal_is_too_narrow():
    rows = [("a b " * 300, "x")]
    written = io.StringIO()
    output.print_table(("one", "two"), rows, stream=written)
    assert len(written.getvalue().splitlines()) > 3
    assert output._format_unfolded(("one", "two"), rows, output.make_console(io.StringIO())) is None
