"""NVIDIA's requirement expressions: parsing and evaluation."""

import pytest

from imagematrix.errors import UsageError
from imagematrix.hardware.vendors.requirements import format_requirement, is_met, parse_requirement

OFFICIAL = "cuda>=12.4 brand=tesla,driver>=470,driver<471 brand=unknown,driver>=470,driver<471"


@pytest.mark.parametrize(
    ("expression", "have", "expected"),
    [
        (OFFICIAL, {"cuda": "12.4"}, True),
        (OFFICIAL, {"cuda": "12.3", "driver": "545.23.08", "brand": "tesla"}, False),
        (OFFICIAL, {"cuda": "11.4", "driver": "470.256.02", "brand": "Tesla"}, True),
        (OFFICIAL, {"cuda": "11.4", "driver": "470.256.02", "brand": "geforce"}, False),
        ("cuda>=12.4", {"cuda": "12.10"}, True),
        ("driver>=550.0", {"driver": "550"}, True),
        ("driver>550", {"driver": "550.0"}, False),
        ("driver<=550.54.14", {"driver": "550.54.14"}, True),
        ("driver=550.", {"driver": "550"}, True),
        ("arch!=8.0", {"arch": "8.0"}, False),
        ("brand!=geforce", {"brand": "nvidia"}, True),
        ("", {}, True),
    ],
)
def test_requirement_is_evaluated(expression, have, expected):
    assert is_met(parse_requirement(expression), lambda one: one.is_met(have[one.name])) is expected


@pytest.mark.parametrize(
    "word",
    ["cuda", "cuda>=", "cuda>=12.x", "brand>tesla", "memory>=1", "cuda==12", "cuda>=1,", "cuda>=\u0661"],
)
def test_invalid_requirement_is_rejected(word):
    with pytest.raises(UsageError, match="invalid requirement"):
        parse_requirement(word)


def test_requirement_round_trips():
    assert format_requirement(parse_requirement(f"  {OFFICIAL} ")) == OFFICIAL
