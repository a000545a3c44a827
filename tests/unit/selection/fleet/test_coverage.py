"""Coverage: served hosts, unserved hosts with reasons, and unused variants."""

from __future__ import annotations

import pytest

from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.hardware.host.host import Host
from imagematrix.selection.fleet.coverage import compute_coverage
from imagematrix.selection.selection import Selection
from imagematrix.selection.selector import explain


@pytest.fixture
def fleet(make):
    return {
        "b": make.host(make.gpu(0)),
        "a": make.host(make.gpu(0, uuid="GPU-other")),
        "c": make.host(make.gpu(0), flags=()),
        "d": make.host(make.gpu(0), driver="550.163.01"),
        "e": make.host(),
    }


@pytest.fixture
def catalog(make):
    return make.catalog(
        make.variant("t:v1-plain"),
        make.variant("t:v1-avx2", cpu_flags=frozenset({"avx2"})),
        make.variant("t:v1-arm", platform="linux/arm64"),
        make.cpu_variant("t:v1-cpu"),
    )


def test_document_conforms_to_the_schema(fleet, catalog, conforms):
    document = conforms(compute_coverage(fleet, catalog).to_json())
    (unserved,) = document.pop("unserved")
    rules = unserved.pop("rules")
    assert unserved == {
        "hosts": ["d"],
        "nearest": "t:v1-avx2",
        "why": "none of the 4 variants of t:v1 fits this host; the nearest is t:v1-avx2, but the image"
        " carries driver 535.261.03, which works only with its own kernel module; the host has 550.163.01",
        "fix": "build a variant with driver 550.163.01",
        "change": {"matrix": {"driver": "550.163.01"}},
    }
    assert [rule["rule"] for rule in rules] == ["driver-exact"]
    assert document == {
        "schema": "imagematrix.coverage/v1",
        "image": "t",
        "version": "v1",
        "hosts": 5,
        "served": 4,
        "unused": ["t:v1-arm"],
        "variants": [
            {"reference": "t:v1-avx2", "hosts": ["a", "b"], "share": 0.4, "fits": 2},
            {"reference": "t:v1-plain", "hosts": ["c"], "share": 0.2, "fits": 3},
            {"reference": "t:v1-cpu", "hosts": ["e"], "share": 0.2, "fits": 1},
            {"reference": "t:v1-arm", "hosts": [], "share": 0.0, "fits": 0},
        ],
        "smallest": {"variants": ["t:v1-plain", "t:v1-cpu"], "exact": True, "least": 2},
        "at_most": None,
        "upgrades": [],
    }


def test_equal_hosts_are_grouped(fleet, catalog):
    report = compute_coverage(fleet, catalog)
    assert [kind.hosts for kind in report.kinds] == [("a", "b"), ("c",), ("d",), ("e",)]
    assert [kind.selected for kind in report.kinds] == ["t:v1-avx2", "t:v1-plain", None, "t:v1-cpu"]
    assert not report.complete
    del fleet["d"]
    assert compute_coverage(fleet, catalog).complete


def test_foreign_architecture_hides_other_reasons(make, catalog):
    host = make.host(make.gpu(0), flags=(), arch="riscv64")
    (unserved,) = compute_coverage({"strange": host}, catalog).unserved
    assert [rule.rule for rule in unserved.miss.relevant] == ["platform"]
    assert len(unserved.miss.rules) >= 1


def test_gpus_option_decides_which_variants_fit(fleet, catalog):
    without = compute_coverage(fleet, catalog, gpus="none")
    assert [service.reference for service in without.variants if service.hosts] == ["t:v1-cpu"]
    assert without.served == 5
    assert compute_coverage(fleet, catalog, allow_cpu=True).served == 5


def test_host_without_the_requested_gpus_is_unserved(make, fleet, catalog, conforms):
    fleet["f"] = make.host(make.gpu(0, uuid="GPU-5"), make.gpu(1, uuid="GPU-6"))
    report = compute_coverage(fleet, catalog, gpus="2")
    conforms(report.to_json())
    reasons = {unserved.hosts: unserved.miss for unserved in report.unserved}
    assert set(reasons) == {("a", "b", "c", "d"), ("e",)}
    miss = reasons["e",]
    assert (miss.nearest, miss.rules, miss.relevant) == (None, (), ())
    assert miss.why == "2 GPUs wanted: 0 of the host's 0 GPUs are usable"
    (miss,) = (
        unserved.miss
        for unserved in compute_coverage(fleet, catalog, gpus="GPU-6").unserved
        if unserved.hosts[0] == "e"
    )
    assert miss.fix == "it has no GPU"


def test_empty_catalog_serves_no_host(make, fleet):
    report = compute_coverage(fleet, make.catalog())
    (unserved,) = report.unserved
    assert (unserved.hosts, unserved.miss.why) == (("a", "b", "c", "d", "e"), "t:v1 has no variants")
    assert (report.smallest.variants, report.smallest.exact) == ((), True)


def test_empty_fleet_is_rejected(catalog):
    with pytest.raises(UsageError, match="no host"):
        compute_coverage({}, catalog)


def test_smallest_set_prefers_the_most_used_variants(make):
    hosts = {str(number): make.host(make.gpu(0)) for number in range(3)}
    report = compute_coverage(
        hosts, make.catalog(make.variant("t:v1-a"), make.variant("t:v1-b", cuda="12.1"))
    )
    assert report.smallest.variants == ("t:v1-a",)
    assert (report.variants[0].fits, report.variants[1].fits) == (3, 3)


def test_saved_hosts_with_the_shipped_matrix(profiles, shipped_catalog, conforms):
    hosts = {name: Host.load(path) for name, path in profiles.items()}
    report = compute_coverage(
        hosts, shipped_catalog, drivers={"535.261.03": "550.163.01", "550.163.01": "595.45"}
    )
    conforms(report.to_json())
    assert {name for unserved in report.unserved for name in unserved.hosts} == {"grace-hopper", "mixed"}
    for kind in report.kinds:
        answer = explain(kind.sample, shipped_catalog)
        assert kind.selected == answer.selected
        assert kind.fits == {candidate.reference for candidate in answer.candidates if candidate.fits}
        assert isinstance(kind.answer, Selection)
    for unserved in report.unserved:
        candidate = explain(hosts[unserved.hosts[0]], shipped_catalog).candidates[0]
        assert (unserved.miss.nearest, unserved.miss.rules) == (candidate.reference, candidate.failing)


def test_hardware_kinds_are_described(make, catalog):
    plain = make.host(make.gpu(0), make.gpu(1), model="EPYC", level="x86-64-v4")
    odd = make.host(make.gpu(0, name=None, compute=None, state="lost"), driver=None)
    one, two = compute_coverage({"1": plain, "2": odd}, catalog).kinds
    assert (one.gpus, one.driver) == ("2 x NVIDIA L40S (8.9)", "driver 535.261.03")
    assert (one.cpu, one.level) == ("EPYC", "x86-64-v4")
    assert (two.gpus, two.driver) == ("1 x unknown GPU (compute unknown, lost)", "no NVIDIA driver")
    assert (two.cpu, two.level) == ("unknown CPU", "x86_64")
    (bare,) = compute_coverage({"1": make.host()}, catalog).kinds
    assert bare.gpus == "no GPU"


@pytest.fixture
def pythons(make):
    """Images for two versions of Python; CPU-only ones exist only for the older."""
    return make.catalog(
        make.variant("t:v1-3.9", axes=(("python", "3.9"),)),
        make.variant("t:v1-3.13", axes=(("python", "3.13"),)),
        make.cpu_variant("t:v1-cpu", axes=(("python", "3.9"),)),
    )


def test_ambiguous_axis_is_rejected_for_a_fleet(make, pythons):
    both = {"gpu": make.host(make.gpu(0)), "cpu": make.host()}
    with pytest.raises(
        UsageError, match=r"^gpu: variants of t:v1 that fit this host differ in python \(3\.9, 3\.13\)"
    ):
        compute_coverage(both, pythons)
    newer = replace(pythons, variants=pythons.variants[1:])
    with pytest.raises(UsageError, match=r"^the fleet would get a mix of python \(3\.9, 3\.13\)") as caught:
        compute_coverage(both, newer)
    assert caught.value.remedy == "choose one, such as --where python=3.13"
    assert compute_coverage({"cpu": both["cpu"]}, newer).complete


def test_each_axis_value_is_covered_separately(make, pythons, conforms):
    both = {"gpu": make.host(make.gpu(0)), "cpu": make.host()}
    old = compute_coverage(both, pythons, where={"python": "3.9"})
    assert (old.served, old.unused, old.catalog.variants) == (2, (), pythons.variants[::2])
    report = compute_coverage(both, replace(pythons, defaults=(("python", "3.13"),)))
    conforms(report.to_json())
    assert [service.reference for service in report.variants] == ["t:v1-3.13"]
    (unserved,) = report.unserved
    assert (unserved.hosts, unserved.miss.fix) == (("cpu",), "pass where={'python': '3.9'}")


def test_upgrade_that_makes_the_choice_ambiguous_is_a_loss(make, pythons):
    new = make.variant("t:v1-new", driver=make.NEW, axes=(("python", "3.9"),))
    other = make.variant("t:v1-other", driver=make.NEW, axes=(("python", "3.13"),))
    catalog = make.catalog(pythons.variants[0], new, other)
    (upgrade,) = compute_coverage(
        {"a": make.host(make.gpu(0))}, catalog, drivers={make.OLD: make.NEW}
    ).upgrades
    (lost,) = upgrade.lost
    assert "differ in python (3.9, 3.13)" in lost.miss.why
