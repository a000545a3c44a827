"""The variants that hosts need: what each host chooses, the nearest hosts, at most so many."""

from __future__ import annotations

import re
from itertools import combinations

import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.images.catalog.catalog import Ptx
from imagematrix.selection.fleet import variant_limit as module
from imagematrix.selection.fleet.coverage import compute_coverage, with_limit
from imagematrix.selection.fleet.hardware_kinds import group_by_hardware
from imagematrix.selection.fleet.loss import LossCounts, measure_losses
from imagematrix.selection.fleet.needed_variants import find_needed_variants, group_hosts_by_choice
from imagematrix.selection.fleet.page import render_page
from imagematrix.selection.fleet.variant_limit import HostDemand, choose_for_each_number
from imagematrix.selection.selector import Selector, explain

fleets = st.dictionaries(st.text(max_size=3), strategies.hosts, min_size=1, max_size=6)
demands = st.lists(
    st.builds(
        HostDemand,
        hosts=st.integers(1, 3).map(lambda number: tuple(f"host{place}" for place in range(number))),
        fits=st.lists(st.sampled_from("abcdef"), unique=True, max_size=5).flatmap(
            lambda some: st.lists(
                st.builds(LossCounts, native_code=st.integers(0, 1), cpu_flags=st.integers(0, 9)),
                min_size=len(some),
                max_size=len(some),
            ).map(lambda amounts: tuple(zip(some, [LossCounts(), *sorted(amounts)[1:]], strict=False)))
        ),
    ),
    max_size=6,
)


def lost(demands, variants):
    """Return what all hosts lose with these variants only."""
    total = LossCounts()
    for one in demands:
        each = next(
            (loss for name, loss in one.fits if name in variants), LossCounts(left_out=bool(one.fits))
        )
        total += each.multiply(len(one.hosts))
    return total


@given(fleets, strategies.catalogs)
def test_needed_variants_are_those_that_hosts_choose(fleet, catalog):
    found = find_needed_variants(fleet, catalog)
    answers = {name: explain(host, catalog) for name, host in fleet.items()}
    assert found.variants == {answer.selected for answer in answers.values()} - {None}
    chosen = group_hosts_by_choice(fleet, catalog)
    assert {name: ref for ref, names in chosen.items() for name in names} == {
        name: answer.selected for name, answer in answers.items() if answer.selected
    }
    unserved = {name for some in found.unserved for name in some.hosts}
    assert unserved == {name for name, answer in answers.items() if answer.selected is None}
    smaller = replace(
        catalog, variants=tuple(one for one in catalog.variants if one.reference in found.variants)
    )
    assert {name: explain(host, smaller).selected for name, host in fleet.items()} == {
        name: answer.selected for name, answer in answers.items()
    }


@given(fleets, strategies.catalogs)
def test_nearest_host_fails_the_fewest_rules(fleet, catalog):
    found = find_needed_variants(fleet, catalog)
    failing = {
        name: {one.reference: len(one.failing) for one in explain(host, catalog).candidates}
        for name, host in fleet.items()
    }
    for one in catalog.variants:
        if one.reference not in found.variants:
            fewest = min(failing[name][one.reference] for name in fleet)
            nearest = min(name for name in fleet if failing[name][one.reference] == fewest)
            assert found.nearest[one.reference] == nearest
    assert found.variants.isdisjoint(found.nearest)


@given(fleets, strategies.catalogs)
def test_variants_that_are_always_needed_are_added(fleet, catalog):
    always = {one.reference for one in catalog.variants[:2]}
    assert (
        find_needed_variants(fleet, catalog, always=always).variants
        == find_needed_variants(fleet, catalog).variants | always
    )


@given(fleets, strategies.catalogs, st.integers(1, 4))
def test_few_variants_serve_the_most_hosts_then_lose_least(fleet, catalog, limit):
    found = find_needed_variants(fleet, catalog, limit=limit)
    decided = group_by_hardware(fleet, Selector(catalog).explain)
    every = [module.make_demand(kind.hosts, explain(kind.sample, catalog).decision) for kind in decided]
    names = [one.reference for one in catalog.variants]
    best = min(lost(every, some) for size in range(limit + 1) for some in combinations(names, size))
    assert found.limited.exact
    assert found.limited.loss == best == lost(every, found.variants)
    assert len(found.variants) <= limit
    left = {name for some in found.unserved for name in some.hosts}
    served = replace(
        catalog, variants=tuple(one for one in catalog.variants if one.reference in found.variants)
    )
    assert left == {name for name, host in fleet.items() if explain(host, served).selected is None}


@given(fleets, strategies.catalogs)
def test_no_host_loses_by_its_best_variant_and_later_ones_lose_no_less(fleet, catalog):
    for host in fleet.values():
        decision = explain(host, catalog).decision
        amounts = [loss for _, loss in measure_losses(decision)]
        assert amounts[:1] in ([], [LossCounts()])
        assert amounts == sorted(amounts)
        assert [name for name, _ in measure_losses(decision)] == [
            one.reference for one in explain(host, catalog).candidates if one.fits
        ]


@given(demands)
def test_more_variants_never_lose_more(demands):
    points = choose_for_each_number(demands)
    assert [point.limit for point in points] == list(range(1, len(points) + 1))
    assert [point.loss for point in points] == sorted((point.loss for point in points), reverse=True)
    assert points[-1].loss == LossCounts()
    for point in points:
        some = range(point.limit + 1)
        assert point.loss == min(
            lost(demands, pick) for size in some for pick in combinations("abcdef", size)
        )


@given(demands, st.integers(0, 40))
def test_ended_searches_have_a_bound(demands, work):
    points = choose_for_each_number(demands, work=work)
    for found, best in zip(points, choose_for_each_number(demands), strict=False):
        assert found.least <= best.loss <= found.loss
    assert [point.loss for point in points] == sorted((point.loss for point in points), reverse=True)


def test_what_a_host_loses(make):
    host = make.host(make.gpu(compute="8.6"), flags=("avx", "avx2", "fma"))
    catalog = make.catalog(
        make.variant("t:1-best", cubins=("86",), cpu_flags=frozenset({"avx", "avx2"})),
        make.variant("t:2-flags", cubins=("86",), cpu_flags=frozenset()),
        make.variant("t:3-cuda", cubins=("86",), cuda="12.0", cpu_flags=frozenset({"avx", "avx2"})),
        make.variant("t:4-driver", cubins=("86",), driver=None),
        make.variant("t:5-code", cubins=("80",), cpu_flags=frozenset({"avx", "avx2"})),
        make.cpu_variant("t:6-cpu", cpu_flags=frozenset({"avx"})),
    )
    decision = explain(host, catalog, allow_cpu=True).decision
    assert dict(measure_losses(decision)) == {
        "t:1-best": LossCounts(),
        "t:2-flags": LossCounts(cpu_flags=2),
        "t:3-cuda": LossCounts(cuda=1),
        "t:4-driver": LossCounts(driver=1, cpu_flags=2),
        "t:5-code": LossCounts(own_code=1),
        "t:6-cpu": LossCounts(gpus=1, cpu_flags=1),
    }


def test_ptx_is_worse_than_code_for_an_older_gpu(make):
    host = make.host(make.gpu(compute="8.6"))
    catalog = make.catalog(
        make.variant("t:native", cubins=("80",)),
        make.variant("t:ptx", cubins=(), ptx=(Ptx(target="70", isa="8.0"),)),
    )
    decision = explain(host, catalog).decision
    assert dict(measure_losses(decision)) == {"t:native": LossCounts(), "t:ptx": LossCounts(native_code=1)}


def test_each_combination_of_own_axes_is_needed(make):
    catalog = make.catalog(
        make.cpu_variant("t:a", axes=(("python", "3.12"),)),
        make.cpu_variant("t:b", axes=(("python", "3.13"),)),
        make.cpu_variant("t:c", axes=(("python", "3.13"),), cpu_flags=frozenset({"avx512f"})),
    )
    found = find_needed_variants({"node": make.host()}, replace(catalog, defaults=(("python", "3.13"),)))
    assert found.variants == {"t:a", "t:b"}
    assert group_hosts_by_choice({"node": make.host()}, catalog) == {"t:a": ("node",), "t:b": ("node",)}
    assert found.nearest == {"t:c": "node"}
    assert found.unserved == ()


def test_reasons_name_what_is_nearest(make):
    found = find_needed_variants(
        {"node": make.host(make.gpu(compute="7.0"))}, make.catalog(make.variant("t:a"))
    )
    (unserved,) = found.unserved
    assert unserved.hosts == ("node",)
    assert unserved.miss.nearest == "t:a"
    assert [rule.rule for rule in unserved.miss.rules] == ["device-code"]


def test_left_out_hosts_have_a_reason(make):
    fleet = {"old": make.host(), "new": make.host(driver=make.NEW, flags=("sse4_2",)), "other": make.host()}
    catalog = make.catalog(
        make.cpu_variant("t:a", cpu_flags=frozenset({"avx2"})),
        make.cpu_variant("t:b", cpu_flags=frozenset({"sse4_2"})),
    )
    found = find_needed_variants(fleet, catalog, limit=1)
    (left,) = found.unserved
    assert (found.variants, left.hosts) == ({"t:a"}, ("new",))
    assert left.miss.why == "it fits none of the variants that are kept; of all, it would get t:b"
    assert left.miss.fix == "raise --at-most"


def test_limit_below_what_is_always_needed_is_rejected(make):
    catalog = make.catalog(make.cpu_variant("t:a"), make.cpu_variant("t:b"))
    with pytest.raises(UsageError, match="at most 1 are too few"):
        find_needed_variants({"node": make.host()}, catalog, always=["t:a", "t:b"], limit=1)


def test_coverage_shows_the_loss_for_each_number(make, conforms):
    fleet = {
        "a": make.host(make.gpu()),
        "b": make.host(make.gpu(), flags=("avx2", "fma")),
        "c": make.host(flags=("avx2",)),
    }
    catalog = make.catalog(
        make.variant("t:v1-gpu", cpu_flags=frozenset({"avx2"})),
        make.variant("t:v1-fma", cpu_flags=frozenset({"avx2", "fma"})),
        make.cpu_variant("t:v1-cpu"),
    )
    report = with_limit(compute_coverage(fleet, catalog), 2, always=["t:v1-cpu"])
    document = conforms(report.to_json())
    assert document["at_most"]["chosen"]["variants"] == ["t:v1-cpu", "t:v1-gpu"]
    points = document["at_most"]["by_number"]
    assert [(one["limit"], one["worse"], one["left_out"]) for one in points] == [
        (1, 0, ["a", "b"]),
        (2, 1, []),
        (3, 0, []),
    ]
    assert points[1]["loss"]["cpu_flags"] == 1
    assert report.complete
    assert not with_limit(report, 1, always=["t:v1-cpu"]).complete
    text = render_page(report)
    assert "At most 2 variants" in text
    (chosen,) = re.findall(r'<tr class="asked">.*?</tr>', text)
    assert "chosen: 2</th>" in chosen
    assert [*re.findall(r'<td class="number">(\d+)', chosen)][:3] == ["2", "1", "0"]  # best, worse, left out
