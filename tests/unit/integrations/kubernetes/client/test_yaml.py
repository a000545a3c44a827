"""YAML as we write it: a text stays a text, whatever a reader would make of it without quotes.

`tests/engine/test_read_back.py` asks kubectl.
"""

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.client.yaml import dump_yaml, is_plain

# What YAML 1.1, YAML 1.2 or go-yaml take for a number, a boolean, a date, nothing or a merge.
MISTAKABLE = (
    *("08", "1e3", "1e-3", "12e4", "0.1e1", "0o17", "0x1f", "0b11", "1_000", "190:20:30", "1.", ".5", "+1"),
    *(".inf", "-.INF", ".NaN", "+inf", "y", "n", "Y", "N", "yes", "No", "on", "OFF", "true", "tRue", "null"),
    *("~", "<<", "=", "2001-01-01", "2001-01-01T00:00:00Z", "a:", "--seed", "-"),
)


@pytest.mark.parametrize("text", MISTAKABLE)
def test_what_a_reader_could_mistake_is_in_quotes(text):
    assert not is_plain(text)
    assert dump_yaml({text: [text]}) == f"'{text}':\n  - '{text}'\n"


def test_an_empty_text_is_in_quotes():
    assert not is_plain("")
    assert dump_yaml({"args": [""]}) == "args:\n  - ''\n"


@pytest.mark.parametrize("text", ["train", "v1", "imagematrix.io/class", "/dev/nvidia0", "reg.x:5000/t:v1"])
def test_names_and_paths_need_no_quotes(text):
    assert dump_yaml({text: text}) == f"{text}: {text}\n"


def test_lines_are_a_block():
    assert dump_yaml({"script": "a: 1\nb\n"}) == "script: |\n  a: 1\n  b\n"


def test_several_documents_are_separated():
    assert dump_yaml({"a": 1}, {"b": [True, None]}) == "a: 1\n---\nb:\n  - true\n  - null\n"


@given(st.text(st.characters(exclude_categories=["Cs"])))
@example("0\n")
@example("0\n\n")
def test_any_text_is_read_as_it_was(text):
    assert yaml.safe_load(dump_yaml({text: [text, {text: text}]})) == {text: [text, {text: text}]}


def test_a_text_that_is_not_unicode_is_an_error():
    with pytest.raises(UsageError, match=r"not UTF-8: 'x\\udce9'") as refused:
        dump_yaml({"args": ["x\udce9"]})
    assert refused.value.remedy == "give this text in UTF-8"
