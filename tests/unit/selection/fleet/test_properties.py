"""Properties of a coverage for every fleet and every catalog."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import strategies
from hypothesis import given
from hypothesis import strategies as st
from strategies import catalogs, hosts

from imagematrix.errors import ImagematrixError
from imagematrix.selection.fleet.coverage import compute_coverage
from imagematrix.selection.fleet.page import render_page
from imagematrix.selection.selector import select_many

# Only numbers of drivers that can follow each other.
DRIVERS = sorted({*strategies.DRIVERS} - {"540.4.0"})
fleets = st.dictionaries(st.text(max_size=3), hosts, min_size=1, max_size=8)
wanted = st.sampled_from([None, None, "none", "1", "device=0"])
upgrades = st.dictionaries(st.sampled_from(DRIVERS), st.sampled_from(DRIVERS))


def there(fleet):
    """Return the drivers in a fleet; an upgrade from any other driver is rejected."""
    return {host.driver.version for host in fleet.values() if host.driver}


def possible(drivers, fleet):
    """Return the pairs of `drivers` whose old driver is in the fleet."""
    return {old: new for old, new in drivers.items() if old in there(fleet)}


def fitting(answer):
    """Return the references of all candidates for which every rule holds."""
    if isinstance(answer, ImagematrixError):
        return frozenset()
    return frozenset(candidate.reference for candidate in answer.candidates if candidate.fits)


@given(fleets, catalogs, wanted, st.booleans(), upgrades)
def test_every_host_is_counted_once(fleet, catalog, gpus, allow_cpu, drivers):
    drivers = possible(drivers, fleet)
    report = compute_coverage(fleet, catalog, gpus=gpus, allow_cpu=allow_cpu, drivers=drivers)
    served = [name for service in report.variants for name in service.hosts]
    unserved = [name for one in report.unserved for name in one.hosts]
    assert sorted(served + unserved) == sorted(fleet)
    assert (report.hosts, report.served) == (len(fleet), len(served))
    assert sum(service.share for service in report.variants) <= 1 + 1e-9
    assert {service.reference for service in report.variants} == {one.reference for one in catalog.variants}
    for upgrade in report.upgrades:
        names = [
            name
            for some in (upgrade.lost, upgrade.changed, upgrade.gained)
            for one in some
            for name in one.hosts
        ]
        assert len(set(names)) == len(names)
        assert len(names) + upgrade.unchanged == upgrade.hosts
        assert set(names) <= {
            name for name, host in fleet.items() if host.driver and host.driver.version == upgrade.old
        }


@given(fleets, catalogs, wanted, st.booleans())
def test_coverage_agrees_with_select(fleet, catalog, gpus, allow_cpu):
    report = compute_coverage(fleet, catalog, gpus=gpus, allow_cpu=allow_cpu)
    kinds = {name: kind for kind in report.kinds for name in kind.hosts}
    answers = select_many(fleet.values(), catalog, gpus=gpus, allow_cpu=allow_cpu)
    fits = dict.fromkeys((variant.reference for variant in catalog.variants), 0)
    for name, answer in zip(fleet, answers, strict=True):
        assert kinds[name].selected == getattr(answer, "selected", None)
        assert kinds[name].fits == fitting(answer)
        for reference in kinds[name].fits:
            fits[reference] += 1
    assert {service.reference: service.fits for service in report.variants} == fits
    reasons = {name: one.miss for one in report.unserved for name in one.hosts}
    for name, answer in zip(fleet, answers, strict=True):
        if isinstance(answer, ImagematrixError):
            assert (reasons[name].why, reasons[name].fix) == (str(answer), answer.remedy)


@given(fleets, catalogs)
def test_smallest_set_is_sufficient_and_minimal(fleet, catalog):
    report = compute_coverage(fleet, catalog)
    served = {name for service in report.variants for name in service.hosts}

    def serves(references):
        variants = tuple(variant for variant in catalog.variants if variant.reference in references)
        fewer = compute_coverage(fleet, replace(catalog, variants=variants))
        return {name for service in fewer.variants for name in service.hosts} == served

    least = report.smallest
    assert serves(least.variants)
    assert least.exact
    references = [variant.reference for variant in catalog.variants]
    if least.variants:
        assert not any(map(serves, combinations(references, len(least.variants) - 1)))


@given(fleets, catalogs, upgrades, st.randoms())
def test_order_of_hosts_and_variants_does_not_matter(fleet, catalog, drivers, source):
    drivers = possible(drivers, fleet)
    names = source.sample(list(fleet), len(fleet))
    variants = tuple(source.sample(catalog.variants, len(catalog.variants)))
    one = compute_coverage(fleet, catalog, drivers=drivers)
    two = compute_coverage(
        {name: fleet[name] for name in names}, replace(catalog, variants=variants), drivers=drivers
    )
    assert one.to_json() == two.to_json()
    assert render_page(one) == render_page(two)


@given(fleets, catalogs, wanted)
def test_upgrade_to_the_same_driver_changes_nothing(fleet, catalog, gpus):
    for upgrade in compute_coverage(
        fleet, catalog, gpus=gpus, drivers={one: one for one in there(fleet)}
    ).upgrades:
        assert (upgrade.lost, upgrade.changed, upgrade.gained, upgrade.unchanged) == (
            (),
            (),
            (),
            upgrade.hosts,
        )


@given(fleets, catalogs, upgrades)
def test_documents_conform(conforms, fleet, catalog, drivers):
    conforms(compute_coverage(fleet, catalog, drivers=possible(drivers, fleet)).to_json())


@given(fleets, catalogs)
def test_added_host_does_not_affect_others(fleet, catalog):
    report = compute_coverage(fleet, catalog)
    name, *rest = fleet
    if rest:
        fewer = compute_coverage({other: fleet[other] for other in rest}, catalog)
        for service in fewer.variants:
            (same,) = (one for one in report.variants if one.reference == service.reference)
            assert set(service.hosts) == set(same.hosts) - {name}
