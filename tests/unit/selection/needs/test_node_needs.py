"""Needs for a scheduler that is told other facts than the labels of Kubernetes' nodes carry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from imagematrix.common.record import replace as replaced
from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.nodes.labels import VOCABULARY
from imagematrix.selection.needs.equivalence import (
    NameScale,
    NumberScale,
    TruthScale,
    ValueClass,
    VersionScale,
    Vocabulary,
)
from imagematrix.selection.needs.node_needs import derive_needs
from imagematrix.selection.rules import RULES


def told(*left_out):
    """Return a vocabulary without some facts."""
    scales = {fact: scale for fact, scale in VOCABULARY.scales.items() if fact not in left_out}
    return Vocabulary(carrier="features of nodes", scales=scales, flags=VOCABULARY.flags)


def compared(variant):
    """Return the facts that rules compare for a variant."""
    return {fact for rule in RULES if rule.need(variant) is not None for fact in rule.thresholds(variant)}


@pytest.mark.parametrize("fact", VOCABULARY.scales)
def test_only_variants_about_which_a_fact_decides_need_it(make, fact):
    variants = (
        make.variant(),
        make.variant(driver=make.umd("compat", "560.35.05")),
        make.variant(driver=make.umd("host"), requires=("brand=tesla,driver>=535",)),
        make.variant(gpu_memory_mib=16384),
        make.cpu_variant(),
    )
    refused = 0
    for variant in variants:
        if fact in compared(variant):
            refused += 1
            with pytest.raises(UsageError, match=f"compares {fact}, which features of nodes do not have"):
                derive_needs(variant, told(fact))
        else:
            assert derive_needs(variant, told(fact)) == derive_needs(variant, VOCABULARY)
    assert refused > 0


def test_a_rule_judges_variants_with_equal_needs_once(make, monkeypatch):
    (rule,) = [rule for rule in RULES if rule.name == "driver-gpu"]
    judged = []

    def is_satisfied(target, variant):
        judged.append(variant)
        return rule.is_satisfied(target, variant)

    counting = [replaced(one, is_satisfied=is_satisfied) if one is rule else one for one in RULES]
    monkeypatch.setattr("imagematrix.selection.needs.node_needs.RULES", counting)
    for own in ("550.54.14", "550.163.01"):
        variant = make.variant(driver=make.umd("exact", own))
        assert [need.driver for need in derive_needs(variant, VOCABULARY)] == [own]
    assert len({variant.driver.version for variant in judged}) == 1


def test_requirements_on_too_many_drivers_are_not_judged(make):
    """The time grows with a power of their number, which the image's author chooses."""
    expression = " ".join(f"driver>={number},arch>=8.0" for number in range(450, 499))
    with pytest.raises(UsageError, match="nvidia-require compares 49 driver versions, more than the 48"):
        derive_needs(make.variant(requires=(expression,)), VOCABULARY)


def test_flags_that_are_not_told(make):
    variant = make.cpu_variant(cpu_flags=frozenset(["avx2"]))
    silent = replace(told(), flags=lambda _: frozenset())
    with pytest.raises(UsageError, match=r"cpu\.flags that features of nodes do not have: avx2"):
        derive_needs(variant, silent, allow_cpu=True)


@pytest.mark.parametrize("expression", ["brand!=tesla", "brand=tesla"])
def test_the_case_of_a_brand_makes_no_difference(make, expression):
    lower, upper = (
        derive_needs(make.variant(driver=make.umd("host"), requires=(text,)), VOCABULARY)
        for text in (expression, expression.replace("t", "T"))
    )
    assert lower == upper
    assert all(("tesla" in (need.brands or ())) is (expression == "brand=tesla") for need in lower)


PARTIAL = frozenset(
    {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"}
    | {"avx512_vbmi2", "fma", "bmi1", "bmi2", "pku"}
)


def test_flags_that_only_a_warning_compares_are_no_needs(make):
    variant = make.cpu_variant(cpu_flags=frozenset(["avx2"]))
    assert len(PARTIAL) == 12
    warned = replaced(variant, partial_flags=PARTIAL)
    assert derive_needs(warned, VOCABULARY) == derive_needs(variant, VOCABULARY)
    assert [{*need.flags} for need in derive_needs(warned, VOCABULARY)] == [{"avx2"}]


@pytest.mark.parametrize("own", [frozenset(["avx2"]), PARTIAL])
def test_no_node_has_flags_of_two_architectures(make, own):
    assert derive_needs(make.cpu_variant(cpu_flags=own | {"asimddp"}), VOCABULARY) == ()


def shown(value_classes: tuple[ValueClass, ...]):
    return [value_class.shown for value_class in value_classes]


def test_the_values_of_a_fact_are_those_that_rules_tell_apart():
    names = NameScale(names=("a", "b", "c"), other="other")
    assert shown(names.make_value_classes({"a", "x"})) == [("a",), ("b", "c"), ("other",)]
    assert names.make_value_classes({"a", "x"})[-1].samples[1:] == (
        "x",
    )  # told like any other name, so both have to fit
    numbers = NumberScale(starts=lambda value: (int(str(value)),), value=lambda number: number, last=99)
    assert shown(numbers.make_value_classes({10, 20})) == [(0, 9), (10, 19), (20, 98), (99, 99)]
    assert numbers.find_representatives({10}, 15) == (10,)
    assert shown(TruthScale().make_value_classes(set())) == [(True,), (False,)]


def test_the_intervals_of_driver_versions():
    versions = VersionScale()
    value_classes = versions.make_value_classes({"550", "535.5.1"})
    starts = [value_class.shown[0] for value_class in value_classes]
    assert starts[0] == (100, 0)
    assert (550, 0) in starts
    assert "535.5.1" in starts  # by itself: a rule may compare texts
    assert "550" not in starts  # no driver has this text
    low, high = map(str, versions.find_representatives({"550"}, "549.1"))
    assert (low, high[:4]) == ("100.000", "549.")  # 100.00 could be a Tegra driver
