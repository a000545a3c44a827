"""Patterns with wildcards: they match as regular expressions do, and in linear time."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.build.plan.wildcard import ANY, FOLDERS, KEPT, WITHIN, Wildcard

EXPRESSIONS = {WITHIN: "[^/]*", ANY: ".*", FOLDERS: "(.*/)?"}
PARTS = st.lists(st.sampled_from([*EXPRESSIONS, "a", "b", "/", "[^/]", "[^a]", r"\W"]), max_size=7)


@given(PARTS, st.text("ab/\n", max_size=9))
def test_it_matches_what_the_regular_expression_does(parts, text):
    expression = "".join(EXPRESSIONS.get(part, part) for part in parts)
    assert Wildcard(parts).matches(text) == bool(re.fullmatch(expression, text, re.ASCII))


@pytest.mark.parametrize(
    "parts", [[WITHIN, "a"] * 500, [FOLDERS, "a"] * 500, [ANY] * 500, [WITHIN, r"[^b]"] * 500]
)
def test_no_pattern_tries_one_way_after_the_other(parts, monkeypatch):
    wildcard = Wildcard([*parts, "b"])
    steps = []
    after = Wildcard._advance
    monkeypatch.setattr(Wildcard, "_advance", lambda *words: steps.append(words) or after(*words))
    assert not wildcard.matches("a" * 4000 + "ba")
    assert len(steps) <= 4002


def test_what_is_remembered_is_bounded():
    wildcard = Wildcard([WITHIN, "a", *["[ab]"] * 20, "b"])
    names = (f"{number:b}".replace("1", "a").replace("0", "b") for number in range(20_000))
    assert sum(map(wildcard.matches, names)) == 0
    assert len(wildcard._steps) <= KEPT
