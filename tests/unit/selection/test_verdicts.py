"""Verdicts that are kept for targets with equal facts are those that the rules give each target."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from strategies import FLAGS, SIGNS, allowed, catalogs, hosts

from imagematrix.common.record import replace
from imagematrix.selection import variant_index as index_module
from imagematrix.selection.hardware_key import keep_distinct_gpus, make_hardware_key
from imagematrix.selection.order import order_criteria
from imagematrix.selection.rules import RULES
from imagematrix.selection.rules.cpu import get_needed_flags
from imagematrix.selection.selection_target import Target
from imagematrix.selection.selector import Selector
from imagematrix.selection.variant_index import VariantIndex
from imagematrix.selection.verdicts import KEPT, RuleGroups

EVERY = sorted(frozenset().union(*FLAGS.values()))


@st.composite
def twins(draw):
    """Return hosts of which some differ in flags, in their other accelerators, or in what no rule reads."""
    some = draw(st.lists(hosts, min_size=1, max_size=3))
    for host in tuple(some):
        lacking = draw(st.sets(st.sampled_from(EVERY), max_size=3))
        some.append(
            replace(host, cpu=replace(host.cpu, flags=host.cpu.flags - lacking | {f"own{len(some)}"}))
        )
        some.append(replace(host, accelerators=draw(st.sampled_from([(), SIGNS, (*SIGNS, *SIGNS)]))))
        some.append(replace(host, warnings=("something",), devices=("/dev/nvidia7",)))
    return draw(st.permutations(some))


@given(twins(), catalogs, allowed)
def test_an_index_that_was_asked_before_answers_as_a_new_one(some, catalog, allow_cpu):
    criteria = order_criteria(catalog.prefer)
    index = VariantIndex(catalog.variants, criteria)
    for host in (*some, *some):
        target = keep_distinct_gpus(Target(host=host, gpus=host.gpus, allow_cpu=allow_cpu))
        new = VariantIndex(catalog.variants, criteria)
        fitting = index.find_fitting(target)
        assert index.list_members(fitting) == [
            variant
            for variant in sorted(catalog.variants, key=lambda one: one.reference)
            if all(rule.need(variant) is None or rule.is_satisfied(target, variant) for rule in RULES)
        ]
        assert index.group_by_failure_count(target, index.everything) == new.group_by_failure_count(
            target, index.everything
        )
        if catalog.variants:
            assert index.find_nearest(target) == new.find_nearest(target)
        if fitting:
            assert index.find_top_ranked(target, fitting) == new.find_top_ranked(target, fitting)


@given(twins(), catalogs, allowed)
def test_hosts_that_differ_in_flags_that_no_variant_needs_are_of_one_kind(some, catalog, allow_cpu):
    index = VariantIndex(catalog.variants, order_criteria())
    assert index.flags == frozenset().union(*map(get_needed_flags, catalog.variants))
    for host in some:
        other = replace(host, cpu=replace(host.cpu, flags=host.cpu.flags | {"new"}))
        one, two = (
            make_hardware_key(each, each.gpus, allow_cpu=allow_cpu, flags=index.flags)
            for each in (host, other)
        )
        assert (one == two) is bool(host.cpu.flags)  # without flags they could not be read


def test_hosts_that_differ_in_flags_of_a_warning_are_of_two_kinds(make):
    variant = make.cpu_variant(cpu_flags=frozenset({"avx2"}), partial_flags=frozenset({"avx512f"}))
    assert VariantIndex((variant,), order_criteria()).flags == {"avx2", "avx512f"}
    (platform,) = [rule for rule in RULES if rule.name == "platform"]  # which never warns
    assert [*platform.list_compared_values(variant, "arch")] == ["x86_64"]
    old, new = (make.host(march=f"x86-64-v{level}") for level in (3, 4))
    selector = Selector(make.catalog(variant))
    assert [len(selector.explain(host).candidates[0].warnings) for host in (old, new)] == [1, 0]


def test_verdicts_are_kept_for_a_bounded_number_of_targets(make):
    variant = make.variant()
    decided = [(rule, [(variant, 1)]) for rule in RULES if rule.need(variant) is not None]
    groups = RuleGroups(decided)
    for number in range(KEPT + 2):
        host = make.host(make.gpu(name=f"NVIDIA {number}", pci_device_id=f"{number:04x}"))
        groups.get_verdicts(Target(host=host, gpus=host.gpus))
    assert all(len(group._kept) <= KEPT for group in groups._rule_groups)


def test_rules_that_share_no_fact_are_in_groups_of_their_own(make):
    variant = make.variant(compressed_fatbin=True, requires=("cuda>1",))
    decided = [(rule, [(variant, 1)]) for rule in RULES if rule.need(variant) is not None]
    groups = RuleGroups(decided)
    names = [{rule.name for rule, _ in group._groups_by_rule} for group in groups._rule_groups]
    assert {"cpu"} in names
    assert {"platform"} in names
    assert len(names) == 3
    host = make.host(make.gpu())
    verdicts = groups.get_verdicts(Target(host=host, gpus=host.gpus))
    assert [one._rule.name for one in verdicts] == [rule.name for rule, _ in decided]


def test_top_ranked_variants_are_kept_for_a_bounded_number_of_sets(make, monkeypatch):
    monkeypatch.setattr(index_module, "KEPT", 2)
    variants = tuple(make.variant(f"t:{number}", march=f"m{number}") for number in range(4))
    index = VariantIndex(variants, order_criteria())
    host = make.host(make.gpu())
    target = Target(host=host, gpus=host.gpus)
    for number, variant in enumerate(variants):
        assert index.find_top_ranked(target, 1 << number) == [variant]
        assert len(index._top_ranked) <= 2
