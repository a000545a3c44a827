"""Properties of a selection for every host and every catalog."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from strategies import FLAGS, allowed, catalogs, hosts, variants

from imagematrix.errors import ImagematrixError
from imagematrix.hardware.gpu_request.spec import find_candidates, make_exact_spec, select_gpus
from imagematrix.selection.candidate import evaluate_rules
from imagematrix.selection.hardware_key import keep_distinct_gpus
from imagematrix.selection.order import make_sort_key, order_criteria
from imagematrix.selection.selection import NothingFits
from imagematrix.selection.selection_target import Target
from imagematrix.selection.selector import explain, find_feasible_gpu_sets, select, select_many
from imagematrix.selection.variant_index import VariantIndex


def fits(host, variant, *, allow_cpu):
    """Whether a variant fits according to each rule alone."""
    target = Target(host=host, gpus=host.gpus, allow_cpu=allow_cpu)
    return all(result.ok for result in evaluate_rules(target, variant))


def outcome(host, catalog, **options):
    """Return what `select` returns or raises."""
    try:
        return select(host, catalog, **options)
    except ImagematrixError as error:
        return error


@given(hosts, catalogs)
def test_cpu_image_on_accelerator_hosts_needs_consent(host, catalog):
    chosen = explain(host, catalog).variant
    if host.gpus or host.accelerators:
        assert chosen is None or chosen.gpu
    if chosen and chosen.gpu:
        assert all(gpu.usable for gpu in host.gpus)
        own = chosen.driver and chosen.driver.mode != "host"
        assert not (own and any(gpu.state == "vgpu" for gpu in host.gpus))
    assert (
        explain(host, catalog, gpus="none").variant
        == explain(replace(host, gpus=(), accelerators=()), catalog).variant
    )


@given(hosts, catalogs)
def test_consent_never_beats_a_gpu_variant_that_fits(host, catalog):
    strict, consenting = explain(host, catalog), explain(host, catalog, allow_cpu=True)
    if strict.variant and strict.variant.gpu:
        assert consenting.variant is strict.variant


def plus(catalog, *more):
    return replace(catalog, variants=(*catalog.variants, *more))


@given(hosts, catalogs, allowed)
def test_selected_variant_is_the_minimum_of_those_that_fit(host, catalog, allow_cpu):
    fitting = [variant for variant in catalog.variants if fits(host, variant, allow_cpu=allow_cpu)]
    target = Target(host=host, gpus=host.gpus, allow_cpu=allow_cpu)
    expected = min(
        fitting,
        key=lambda variant: make_sort_key(order_criteria(catalog.prefer), target, variant),
        default=None,
    )
    assert explain(host, catalog, allow_cpu=allow_cpu).variant is expected


@given(hosts, catalogs, allowed)
def test_nothing_fits_if_and_only_if_no_candidate_fits(host, catalog, allow_cpu):
    selection = explain(host, catalog, allow_cpu=allow_cpu)
    nothing = not any(candidate.fits for candidate in selection.candidates)
    answer = outcome(host, catalog, allow_cpu=allow_cpu)
    assert isinstance(answer, NothingFits) is nothing
    if nothing:
        assert str(answer)
        assert answer.remedy or not catalog.variants
        assert answer.selection.to_json() == selection.to_json()
    else:
        assert selection.candidates[0].reference == selection.selected


@given(hosts, catalogs, allowed, st.randoms())
def test_catalog_order_does_not_matter(host, catalog, allow_cpu, random):
    other = replace(catalog, variants=tuple(random.sample(catalog.variants, len(catalog.variants))))
    one, two = (explain(host, some, allow_cpu=allow_cpu) for some in (catalog, other))
    assert one.to_json() == two.to_json()
    if one.selected is None:
        assert one.miss == two.miss


@given(hosts, catalogs, variants, allowed)
def test_added_variant_is_selected_or_changes_nothing(host, catalog, variant, allow_cpu):
    before = explain(host, catalog, allow_cpu=allow_cpu).selected
    after = explain(host, plus(catalog, variant), allow_cpu=allow_cpu).selected
    assert after in (before, variant.reference)
    if not fits(host, variant, allow_cpu=allow_cpu):
        assert after == before


@given(hosts, catalogs, st.frozensets(st.sampled_from(sorted(FLAGS["sapphirerapids"] | {"new"}))), allowed)
def test_more_cpu_flags_never_exclude_a_variant(host, catalog, more, allow_cpu):
    richer = replace(host, cpu=replace(host.cpu, flags=host.cpu.flags | more))
    for variant in catalog.variants:
        assert fits(richer, variant, allow_cpu=allow_cpu) >= fits(host, variant, allow_cpu=allow_cpu)


@given(hosts, catalogs, allowed)
def test_fewer_gpus_never_exclude_a_gpu_variant(host, catalog, allow_cpu):
    for variant in catalog.variants:
        if variant.gpu and fits(host, variant, allow_cpu=allow_cpu):
            for gpu in host.gpus:
                assert fits(replace(host, gpus=(gpu,)), variant, allow_cpu=allow_cpu)


@given(st.lists(hosts, max_size=6), catalogs, allowed, st.sampled_from([None, "none", "1", "device=0"]))
def test_select_many_equals_select_per_host(some, catalog, allow_cpu, wanted):
    answers: list[Any] = select_many(some, catalog, gpus=wanted, allow_cpu=allow_cpu)
    for host, answer in zip(some, answers, strict=True):
        expected = outcome(host, replace(catalog), gpus=wanted, allow_cpu=allow_cpu)
        assert type(answer) is type(expected)
        if isinstance(answer, ImagematrixError):
            assert (str(answer), answer.remedy) == (str(expected), expected.remedy)
        else:
            assert answer.to_json() == expected.to_json()


@given(hosts, catalogs, allowed)
def test_nearest_variant_is_the_first_candidate(host, catalog, allow_cpu):
    selection = explain(host, catalog, allow_cpu=allow_cpu)
    if selection.selected is None and catalog.variants:
        index = VariantIndex(catalog.variants, order_criteria(catalog.prefer))
        target = keep_distinct_gpus(Target(host=host, gpus=host.gpus, allow_cpu=allow_cpu))
        assert index.find_nearest(target).reference == selection.candidates[0].reference


@given(hosts, catalogs, st.integers(1, 3))
def test_serving_lists_every_gpu_set_that_a_variant_fits(host, catalog, count):
    if count > sum(gpu.state == "ok" for gpu in host.gpus):
        return
    choice = find_candidates(host.gpus, count)
    choices = find_feasible_gpu_sets(host, catalog, choice)
    assert {one.count for one in choices} == {count}
    possible = {
        some
        for some in combinations(choice.gpus, count)
        if explain(host, catalog, gpus=make_exact_spec(some)).variant
    }
    offered = {some for one in choices for some in combinations(one.gpus, count)}
    if possible:
        assert offered == possible
        assert choices[0].first == min(possible, key=lambda some: [gpu.index for gpu in some])
    else:
        assert choices == (choice,)


@given(hosts, catalogs)
def test_serving_keeps_a_fixed_choice(host, catalog):
    for wanted in (None, "all", "none"):
        choice = find_candidates(host.gpus, wanted)
        assert find_feasible_gpu_sets(host, catalog, choice) == (choice,)


@given(hosts, catalogs, st.sampled_from([None, "none", "1", "device=0"]))
def test_gpu_objects_and_gpu_names_are_equivalent(host, catalog, wanted):
    if host.gpus and all(gpu.usable for gpu in host.gpus):
        gpus = select_gpus(host.gpus, wanted)
        if gpus:
            by_name = explain(host, catalog, gpus=make_exact_spec(gpus))
            assert explain(host, catalog, gpus=gpus).to_json() == by_name.to_json()
