"""Both sides of every boundary of the rule `nvidia-require`."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("requires", "ok"),
    [
        (("driver>=550",), True),
        (("driver>=551",), False),
        (("driver>=551 brand=nvidia",), True),
        (("arch>=8.9",), True),
        (("arch>=9.0", "driver>=550"), False),
        (("cuda<12.4",), False),
    ],
)
def test_requirements_of_the_image_must_hold(judge, make, requires, ok):
    host = make.host(make.gpu(compute="8.9", brand="nvidia"), driver="550.163.01")
    result = judge("nvidia-require", host, make.variant(requires=requires))
    assert result.ok is ok
    assert result.need == " and ".join(requires)
    assert "driver=550.163.01" in result.have
    if not ok:
        assert result.why.startswith(f"the image requires {requires[0]}; the host has cuda=12.4 ")
        assert result.fix


def test_every_gpu_must_satisfy_the_requirement(judge, make):
    host = make.host(make.gpu(compute="9.0"), make.gpu(1, compute="8.0"))
    assert not judge("nvidia-require", host, make.variant(requires=("arch>=9.0",))).ok


def test_conditions_on_what_is_absent_do_not_matter(judge, make):
    asks = make.variant(requires=("arch>=9.0", "driver>=999"))
    assert judge("nvidia-require", make.host(driver=None), asks).ok


@pytest.mark.parametrize(
    ("requires", "driver"),
    [
        ("brand=tesla", "550.163.01"),
        ("brand!=geforce", "550.163.01"),
        ("arch<9.0", None),
        ("cuda<9", "340.108"),
    ],
)
def test_unknown_facts_of_what_is_there_meet_no_condition(judge, make, requires, driver):
    host = make.host(make.gpu(compute=None, brand=None), driver=driver)
    assert not judge("nvidia-require", host, make.variant(requires=(requires,))).ok


def test_rule_is_skipped_without_requirements(judge, make):
    assert judge("nvidia-require", make.host(make.gpu()), make.variant()) is None
