"""Warm images: one is chosen exactly where every stated fact is equal, and never changes the variant."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import catalogs, hosts

from imagematrix.common.record import replace
from imagematrix.hardware.host import usable_cpus
from imagematrix.hardware.host.host import Driver, Host, MigDevice
from imagematrix.images.catalog.warm_image import FACTS, WarmImage, WarmMatch
from imagematrix.selection.gang.gang_selection import select_gang
from imagematrix.selection.selector import explain
from imagematrix.selection.warm import _COMPARISONS, choose_warm_image, may_be_started

BASE, OTHER = (f"sha256:{digit * 64}" for digit in "ab")
NUMBERS = itertools.count()


def warm(match, reference="t:v1-warm-a-b", *, base=BASE, schema=1):
    return WarmImage(
        base=base,
        reference=reference,
        digest=f"sha256:{next(NUMBERS):064x}",
        match=WarmMatch.from_json(match),
        schema=schema,
    )


def describe(host, gpus):
    """Return the match that states everything about a host with GPUs of one kind."""
    match = {
        "cpu": {
            "vendor": host.cpu.vendor,
            "name": host.cpu.model,
            "flags": sorted(host.cpu.flags),
            "without": ["of_no_cpu"],
        },
        "cpus": host.cpu.usable,
        "user_mode": host.driver and host.driver.user_mode,
    }
    if gpus:
        first = gpus[0]
        match["gpus"] = {
            "count": len(gpus),
            "compute": first.compute,
            "name": first.name,
            "memory_mib": first.memory_mib,
            "mig": "",
        }
    return match


@pytest.fixture
def node(make):
    """A node of which every fact is known, with two equal GPUs."""
    gpus = [make.gpu(index, memory_mib=46068) for index in range(2)]
    host = make.host(*gpus)
    driver = Driver(version="550.163.01", kind=None, source="test", user_mode="550.163.01")
    return replace(host, cpu=replace(host.cpu, model="Xeon", usable=8), driver=driver)


def mismatch(match, host, gpus=None):
    """Return what keeps a warm image with this match from a host; None if it is chosen."""
    image = warm(match)
    choice = choose_warm_image([image], host, host.gpus if gpus is None else gpus)
    (verdict,) = choice.verdicts
    assert (choice.image is image) == (verdict.mismatch is None)
    found = verdict.mismatch
    return found and (found.field, found.need, found.have)


def test_every_fact_has_a_comparison():
    assert _COMPARISONS.keys() == FACTS.keys()


def test_a_host_gets_what_was_made_on_it(node):
    assert mismatch(describe(node, node.gpus), node) is None
    assert mismatch({}, node) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"cpus": 1}, True),
        ({"gpus": {"count": 1, "name": "NVIDIA L40S"}}, True),
        ({"gpus": {"count": 1, "name": "NVIDIA L40S", "mig": "1g.10gb"}}, False),
        ({"gpus": {"name": "NVIDIA H100"}}, True),
        ({"gpus": {"name": "NVIDIA H200"}}, False),
        ({"cpu": {"vendor": "AuthenticAMD"}}, False),
        ({"kernel": "6.1"}, False),
    ],
)
def test_some_start_may_get_it_on_other_gpus_and_cpus_than_another(node, make, changes, expected):
    mixed = replace(node, gpus=(*node.gpus, make.gpu(2, name="NVIDIA H100")))
    without_gpus = describe(node, ())
    assert may_be_started(warm(without_gpus | changes), mixed) is expected


def test_without_gpus_some_start_may_get_what_states_none(make):
    assert may_be_started(warm({"cpus": 2}), make.host(driver=None))
    assert not may_be_started(warm({"gpus": {"count": 1}, "gpus.compute": None}), make.host(driver=None))


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"gpus": {"count": 1}}, ("gpus.count", "1", "2")),
        ({"gpus": {"compute": "9.0"}}, ("gpus.compute", "9.0", "8.9")),
        ({"gpus": {"name": "NVIDIA L40"}}, ("gpus.name", "NVIDIA L40", "NVIDIA L40S")),
        ({"gpus": {"memory_mib": 46067}}, ("gpus.memory_mib", "46067", "46068")),
        ({"gpus": {"mig": "1g.10gb"}}, ("gpus.mig", "1g.10gb", "none")),
        ({"user_mode": "550.163.1"}, ("user_mode", "550.163.1", "550.163.01")),
        ({"cpu": {"vendor": "AuthenticAMD"}}, ("cpu.vendor", "AuthenticAMD", "GenuineIntel")),
        ({"cpu": {"name": "EPYC"}}, ("cpu.name", "EPYC", "Xeon")),
        ({"cpu": {"flags": ["amx_tile", "avx2"]}}, ("cpu.flags", "amx_tile, avx2", "without amx_tile")),
        ({"cpu": {"without": ["avx512f", "x"]}}, ("cpu.without", "avx512f, x", "avx512f")),
        ({"cpus": 1}, ("cpus", "1", "8")),
        ({"cpus": None}, ("cpus", "unknown", "unknown")),
        ({"kernel": "6.1"}, ("kernel", "unknown", "unknown")),
        ({"gpus": None}, ("gpus", "unknown", "unknown")),
        ({"gpus": {"nvlink": 4}}, ("gpus.nvlink", "unknown", "unknown")),
    ],
)
def test_one_other_fact_keeps_it_away(node, stated, expected):
    assert mismatch(stated, node) == expected


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"flags": ["avx2"]}, None),
        ({"without": ["amx_tile"]}, None),
        ({"flags": ["avx2", "avx_ifma"]}, ("cpu.flags", "avx2, avx_ifma", "unknown")),
        ({"flags": ["amx_tile", "avx_ifma"]}, ("cpu.flags", "amx_tile, avx_ifma", "without amx_tile")),
        ({"without": ["avx_ifma"]}, ("cpu.without", "avx_ifma", "unknown")),
        ({"without": ["avx_ifma", "avx2"]}, ("cpu.without", "avx2, avx_ifma", "avx2")),
    ],
)
def test_a_flag_that_could_not_be_read_is_neither_there_nor_absent(node, stated, expected):
    unread = replace(node, cpu=replace(node.cpu, unknown_flags=frozenset(["avx_ifma"])))
    assert mismatch({"cpu": stated}, unread) == expected
    assert mismatch({"cpu": stated}, Host.from_json(unread.to_json())) == expected


@pytest.mark.parametrize("fact", FACTS)
def test_null_matches_nothing_on_either_side(node, fact):
    member, _, name = fact.rpartition(".")
    null = {member: {name: None}} if member else {name: None}
    found = mismatch(null, node)
    assert found is not None
    assert found[0] == fact
    unknown = Host.from_json(
        {"schema": "imagematrix.host/v1", "arch": "x86_64", "cpu": {}, "gpus": [{"index": 0, "state": "ok"}]}
    )
    if fact not in ("gpus.count", "gpus.mig"):  # which are never unknown
        value = dict(WarmMatch.from_json(describe(node, node.gpus)).facts)[fact]
        stated = list(value) if isinstance(value, tuple) else value
        found = mismatch({member: {name: stated}} if member else {name: stated}, unknown)
        assert found is not None
        assert found[2] == "unknown"


def test_all_gpus_have_to_be_equal(node, make):
    match = {"gpus": {"name": "NVIDIA L40S"}}
    mixed = (*node.gpus, make.gpu(2, name="NVIDIA H100"))
    assert mismatch(match, node, mixed) == ("gpus.name", "NVIDIA L40S", "NVIDIA H100, NVIDIA L40S")
    assert mismatch(match, node, ()) == ("gpus.name", "NVIDIA L40S", "no GPU")
    assert mismatch({"gpus": {"count": 2}}, node, ()) == ("gpus.count", "2", "0")


def test_mig_devices_count_as_gpus(node):
    devices = [
        MigDevice(
            uuid=f"MIG-{number}", profile="1g.10gb", gpu_instance=number, compute_instance=0, memory_mib=9856
        )
        for number in range(2)
    ]
    one, two = (replace(node.gpus[0], mig=tuple(devices[:count])) for count in (1, 2))
    match = {"gpus": {"count": 1, "mig": "1g.10gb", "memory_mib": 9856, "name": "NVIDIA L40S"}}
    assert mismatch(match, node, (one,)) is None
    assert mismatch(match, node, (two,)) == ("gpus.count", "1", "2")
    assert mismatch({"gpus": {"mig": ""}}, node, (one,)) == ("gpus.mig", "none", "1g.10gb")
    unknown = replace(one, mig=(replace(devices[0], profile=None),))
    assert mismatch({"gpus": {"mig": "1g.10gb"}}, node, (unknown,)) == ("gpus.mig", "1g.10gb", "unknown")


def test_the_order_is_schema_and_then_name(node):
    second, first, other = warm({}, "t:b"), warm({}, "t:a"), warm({"cpus": 1}, "t:0")
    newer = warm({}, "t:z", schema=2)
    choice = choose_warm_image([second, newer, other, first], node, ())
    assert choice.image is first
    assert [verdict.image for verdict in choice.verdicts] == [newer, other, first, second]
    found = choice.verdicts[0].mismatch
    assert found is not None
    assert (found.field, found.need, found.have) == ("schema", "2", "at most 1")


@given(hosts, st.sampled_from([*FACTS]), st.integers(0, 3))
def test_a_match_holds_where_it_was_made_and_no_fact_can_differ(host, fact, usable):
    host = replace(host, cpu=replace(host.cpu, model="Xeon", usable=usable, vendor=host.cpu.vendor or "Arm"))
    assume(host.cpu.flags)
    kinds = {(gpu.compute, gpu.name) for gpu in host.gpus}
    profiles = [device.profile for gpu in host.gpus for device in gpu.mig or ()]
    is_described = len(kinds) == 1 and None not in next(iter(kinds)) and None not in profiles
    stated = describe(host, host.gpus if is_described else ())
    del stated["user_mode"]
    stated.get("gpus", {}).pop("memory_mib", None)
    assert mismatch(stated, host) is None
    match = dict(WarmMatch.from_json(stated).facts)
    if fact in match:
        value = match[fact]
        changed: object = f"{value} other" if isinstance(value, str) else None
        if isinstance(value, int):
            changed = value + 1
        if isinstance(value, tuple):
            changed = [*value, "of_no_cpu" if fact == "cpu.flags" else next(iter(host.cpu.flags))]
        member, _, name = fact.rpartition(".")
        (stated[member] if member else stated)[name] = changed
        found = mismatch(stated, host)
        assert found is not None
        assert found[0] == fact


@given(
    hosts, catalogs, st.sampled_from([{}, {"cpus": 3}, {"cpu": {"vendor": "AuthenticAMD"}}, {"cpu": None}])
)
def test_warm_images_never_change_the_variant(host, catalog, match):
    variants = tuple(replace(one, digest=f"sha256:{n:064x}") for n, one in enumerate(catalog.variants))
    bare = replace(catalog, variants=variants)
    warm_images = tuple(warm(match, f"t:{n}", base=str(one.digest)) for n, one in enumerate(variants))
    with_warm = explain(host, replace(bare, warm=warm_images))
    without = explain(host, bare)
    assert (with_warm.variant, with_warm.gpus) == (without.variant, without.gpus)
    assert with_warm.candidates == without.candidates
    assert without.warm is None
    if with_warm.warm:
        assert with_warm.variant is not None
        assert with_warm.warm.base == with_warm.variant.digest
    if without.variant is None:
        assert with_warm.warm is None


def test_a_selection_says_which_warm_image_it_starts_and_why_not_others(make, conforms):
    host = make.host(driver=None)
    variants = make.cpu_variant("t:a", digest=BASE), make.cpu_variant("t:b", digest=OTHER, march="x86-64")
    images = (
        warm({"cpus": 1}, "t:x"),
        warm({"cpu": {"vendor": "GenuineIntel"}}, "t:y"),
        warm({}, base=OTHER),
    )
    catalog = replace(make.catalog(*variants), warm=images)
    selection = explain(host, catalog)
    assert selection.selected == "t:a"
    assert selection.warm is images[1]
    document = json.loads(json.dumps(selection.to_json()))
    conforms(document)
    assert document["digest"] == BASE
    assert document["warm"] == images[1].digest
    assert [(row["reference"], row["matches"], row["field"]) for row in document["warm_images"]] == [
        ("t:x", False, "cpus"),
        ("t:y", True, None),
    ]
    plain = explain(host, catalog.without_warm())
    assert plain.warm is None
    assert plain.to_json()["warm"] is None
    assert "warm_images" not in plain.to_json()
    conforms(plain.to_json())


def test_a_gang_starts_variants(make):
    host = make.host(driver=None)
    catalog = replace(make.catalog(make.cpu_variant("t:a", digest=BASE)), warm=(warm({}),))
    assert explain(host, catalog).warm is catalog.warm[0]
    gang = select_gang({"a": host, "b": host}, catalog)
    assert gang.variants == catalog.variants
    assert [gang.selection(name).warm for name in "ab"] == [None, None]


def test_the_cpus_of_this_process_are_counted_only_where_a_warm_image_compares_them(make, monkeypatch):
    counted = []

    def add(host):
        counted.append(host)
        return replace(host, cpu=replace(host.cpu, usable=3))

    monkeypatch.setattr(usable_cpus, "add_usable_cpus", add)
    host = make.host(driver=None)
    catalog = make.catalog(make.cpu_variant("t:a", digest=BASE))
    for match, base in (({}, BASE), ({"cpus": 3}, OTHER)):
        selection = explain(host, replace(catalog, warm=(warm(match, base=base),)))
        assert selection.on_this_machine() is selection
    assert explain(host, catalog).on_this_machine().host is host
    selection = explain(host, replace(catalog, warm=(warm({"cpus": 3}),)))
    assert selection.warm is None
    assert selection.on_this_machine().warm is not None
    assert counted == [host]
    saved = explain(replace(host, cpu=replace(host.cpu, usable=1)), selection.decision.catalog)
    assert saved.on_this_machine() is saved
