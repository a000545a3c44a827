"""Verdicts that are kept for targets with equal facts are those that the rules give each target."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from strategies import FLAGS, SIGNS, allowed, catalogs, hosts

from imagematrix.common.record import replace
from imagematrix.selection import index as index_module
from imagematrix.selection.hardware import hardware, sample
from imagematrix.selection.index import Index
from imagematrix.selection.order import order
from imagematrix.selection.rules import RULES
from imagematrix.selection.rules.cpu import needed_flags
from imagematrix.selection.target import Target
from imagematrix.selection.verdicts import KEPT, Panels

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
    criteria = order(catalog.prefer)
    index = Index(catalog.variants, criteria)
    for host in (*some, *some):
        target = sample(Target(host=host, gpus=host.gpus, allow_cpu=allow_cpu))
        new = Index(catalog.variants, criteria)
        fitting = index.fitting(target)
        assert index.members(fitting) == [
            variant
            for variant in sorted(catalog.variants, key=lambda one: one.reference)
            if all(rule.need(variant) is None or rule.holds(target, variant) for rule in RULES)
        ]
        assert index.by_failures(target, index.everything) == new.by_failures(target, index.everything)
        if catalog.variants:
            assert index.nearest(target) == new.nearest(target)
        if fitting:
            assert index.leading(target, fitting) == new.leading(target, fitting)


@given(twins(), catalogs, allowed)
def test_hosts_that_differ_in_flags_that_no_variant_needs_are_of_one_kind(some, catalog, allow_cpu):
    index = Index(catalog.variants, order())
    assert index.flags == frozenset().union(*map(needed_flags, catalog.variants))
    for host in some:
        other = replace(host, cpu=replace(host.cpu, flags=host.cpu.flags | {"new"}))
        one, two = (
            hardware(each, each.gpus, allow_cpu=allow_cpu, flags=index.flags) for each in (host, other)
        )
        assert (one == two) is bool(host.cpu.flags)  # without flags they could not be read


def test_verdicts_are_kept_for_a_bounded_number_of_targets(make):
    variant = make.variant()
    decided = [(rule, [(variant, 1)]) for rule in RULES if rule.need(variant) is not None]
    panels = Panels(decided)
    for number in range(KEPT + 2):
        host = make.host(make.gpu(name=f"NVIDIA {number}", pci_device_id=f"{number:04x}"))
        panels.verdicts(Target(host=host, gpus=host.gpus))
    assert all(len(panel._kept) <= KEPT for panel in panels._panels)


def test_rules_that_share_no_fact_are_in_panels_of_their_own(make):
    variant = make.variant(compressed_fatbin=True, requires=("cuda>1",))
    decided = [(rule, [(variant, 1)]) for rule in RULES if rule.need(variant) is not None]
    panels = Panels(decided)
    names = [{rule.name for rule, _ in panel._decided} for panel in panels._panels]
    assert {"cpu"} in names
    assert {"platform"} in names
    assert len(names) == 3
    host = make.host(make.gpu())
    verdicts = panels.verdicts(Target(host=host, gpus=host.gpus))
    assert [one._rule.name for one in verdicts] == [rule.name for rule, _ in decided]


def test_leading_variants_are_kept_for_a_bounded_number_of_sets(make, monkeypatch):
    monkeypatch.setattr(index_module, "KEPT", 2)
    variants = tuple(make.variant(f"t:{number}", march=f"m{number}") for number in range(4))
    index = Index(variants, order())
    host = make.host(make.gpu())
    target = Target(host=host, gpus=host.gpus)
    for number, variant in enumerate(variants):
        assert index.leading(target, 1 << number) == [variant]
        assert len(index._leading) <= 2
