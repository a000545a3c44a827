"""Conditions on axis values: words, globs, comparisons, negations."""

import pytest

from imagematrix.images.catalog.axis_conditions import ConditionError, match_values, parse_only

CUDA = ("none", "11.8", "12.4", "12.10")
MARCH = ("x86-64-v3", "znver3", "znver4", "haswell")


@pytest.mark.parametrize(
    ("words", "values", "expected"),
    [
        (["12.4"], CUDA, {"12.4"}),
        ([">=12.4"], CUDA, {"12.4", "12.10"}),  # as versions: 12.10 is the newer one
        (["<12"], CUDA, {"11.8"}),
        (["!none"], CUDA, {"11.8", "12.4", "12.10"}),
        (["!=12.4"], CUDA, {"11.8", "12.10"}),
        (["znver*"], MARCH, {"znver3", "znver4"}),
        (["znver*", "!znver3"], MARCH, {"znver4"}),
        (["!znver*", "!haswell"], MARCH, {"x86-64-v3"}),
        (["znver[4]"], MARCH, {"znver4"}),
        (["zen"], MARCH, set()),
        ([">=9.0"], ("8.9", "9.0", "9.0a", "10.0f"), {"9.0", "9.0a", "10.0f"}),
        (["9.0"], ("9.0", "9.0a"), {"9.0"}),
    ],
)
def test_conditions_match_values(words, values, expected):
    assert match_values(words, values) == expected


def test_only_is_parsed_by_axis():
    assert parse_only("cuda>=12.4, march=znver*,march!=znver3,x==1") == {
        "cuda": [">=12.4"],
        "march": ["znver*", "!znver3"],
        "x": ["1"],
    }


@pytest.mark.parametrize("text", ["", "cuda", "=3", "cuda=", "a=b,,"])
def test_invalid_only_expression_is_rejected(text):
    with pytest.raises(ConditionError, match="invalid condition"):
        parse_only(text)
