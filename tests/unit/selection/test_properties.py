"""What holds for every host and every catalog."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from imagematrix.catalog.catalog import CRITERIA, Catalog, Ptx, UserModeDriver, Variant
from imagematrix.errors import ImagematrixError
from imagematrix.facts import marches
from imagematrix.gpus.spec import candidates, exactly
from imagematrix.node.host import Accelerator, Cpu, Driver, Gpu, Host
from imagematrix.selection.index import Index
from imagematrix.selection.node import Node, hardware, kinds
from imagematrix.selection.order import key, order
from imagematrix.selection.rules import RULES, results
from imagematrix.selection.select import explain, select, select_many, serving
from imagematrix.selection.selection import NothingFits

MARCHES = ("x86-64", "x86-64-v3", "x86-64-v4", "haswell", "znver2", "znver4", "sapphirerapids")
FLAGS = {march: marches.required(march, "gcc-14") for march in MARCHES}
DRIVERS = ("525.60.13", "535.261.03", "540.4.0", "550.54.13", "550.163.01", "580.65.06")
SIGNS = (Accelerator(kind="wsl", where="/dev/dxg", why="it is behind it"),)
COMPUTES = ("7.0", "8.0", "8.6", "8.7", "8.9", "9.0")
TARGETS = ("70", "80", "86", "87", "89", "90", "90a")

drivers = st.one_of(
    st.builds(UserModeDriver, mode=st.just("exact"), version=st.sampled_from(DRIVERS)),
    st.builds(
        UserModeDriver,
        mode=st.just("compat"),
        version=st.sampled_from(DRIVERS),
        branches=st.sampled_from([(535,), (525, 535, 550)]),
        brands=st.just(("tesla", "nvidia")),
    ),
    st.just(UserModeDriver(mode="host")),
)
ptx = st.builds(Ptx, target=st.sampled_from(TARGETS), isa=st.sampled_from(["8.0", "8.4", "9.0"]))
platforms = st.sampled_from(["linux/amd64"] * 4 + ["linux/arm64"])
common = {
    "reference": st.uuids().map(lambda uuid: f"t:{uuid}"),
    "digest": st.none(),
    "platform": platforms,
    "cpu_flags": st.sampled_from(MARCHES).map(FLAGS.__getitem__),
    "vendor": st.sampled_from([None, "amd", "intel"]),
    "march": st.uuids().map(str),  # no two of one matrix are alike in everything
}
gpu_variants = st.builds(
    Variant,
    cuda=st.sampled_from(["11.8", "12.0", "12.4", "13.0"]),
    cubins=st.lists(st.sampled_from(TARGETS), max_size=3, unique=True).map(tuple),
    ptx=st.lists(ptx, max_size=2).map(tuple),
    compressed_fatbin=st.booleans(),
    driver=drivers,
    **common,
)
variants = st.one_of(gpu_variants, gpu_variants, st.builds(Variant, **common))
catalogs = st.builds(
    Catalog,
    image=st.just("t"),
    version=st.just("v1"),
    variants=st.lists(variants, max_size=12, unique_by=lambda variant: variant.reference).map(tuple),
    prefer=st.one_of(st.just(()), st.lists(st.sampled_from(CRITERIA), unique=True).map(tuple)),
)
facts = st.fixed_dictionaries(
    {
        "compute": st.sampled_from([*COMPUTES, None]),
        "brand": st.sampled_from(["nvidia", "tesla", "geforce", None]),
        "name": st.sampled_from(["NVIDIA L40S", None]),
        "state": st.sampled_from(["ok"] * 6 + ["vgpu", "lost", "unconfirmed"]),
    }
)
gpus = st.one_of(
    st.lists(facts, max_size=3),
    st.tuples(facts, st.integers(1, 3)).map(lambda pair: [pair[0]] * pair[1]),
).map(lambda some: tuple(Gpu(index=index, uuid=f"GPU-{index}", **one) for index, one in enumerate(some)))
hosts = st.builds(
    Host,
    arch=st.sampled_from(["x86_64"] * 4 + ["aarch64"]),
    cpu=st.builds(
        Cpu,
        vendor=st.sampled_from(["GenuineIntel", "AuthenticAMD", None]),
        model=st.none(),
        flags=st.sampled_from([frozenset[str](), *FLAGS.values(), frozenset().union(*FLAGS.values())]),
        level=st.none(),
    ),
    driver=st.one_of(
        st.none(), st.builds(Driver, version=st.sampled_from(DRIVERS), kind=st.none(), source=st.just("test"))
    ),
    gpus=gpus,
    accelerators=st.sampled_from([(), (), SIGNS]),
)
allowed = st.booleans()


def fits(host, variant, *, allow_cpu):
    """Whether a variant fits, by asking every rule about it alone."""
    node = Node(host=host, gpus=host.gpus, allow_cpu=allow_cpu)
    return all(result.ok for result in results(node, variant))


def outcome(host, catalog, **options):
    """Return what `select` returns or raises."""
    try:
        return select(host, catalog, **options)
    except ImagematrixError as error:
        return error


@given(hosts, catalogs)
def test_what_has_an_accelerator_gets_an_image_for_cpus_on_demand_alone(host, catalog):
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


def plus(catalog, *more):
    return replace(catalog, variants=(*catalog.variants, *more))


@given(hosts, catalogs, allowed)
def test_the_selected_variant_is_the_least_of_those_that_fit(host, catalog, allow_cpu):
    fitting = [variant for variant in catalog.variants if fits(host, variant, allow_cpu=allow_cpu)]
    node = Node(host=host, gpus=host.gpus, allow_cpu=allow_cpu)
    expected = min(fitting, key=lambda variant: key(order(catalog.prefer), node, variant), default=None)
    assert explain(host, catalog, allow_cpu=allow_cpu).variant is expected


@given(hosts, catalogs, allowed)
def test_nothing_fits_exactly_where_no_candidate_fits(host, catalog, allow_cpu):
    found = explain(host, catalog, allow_cpu=allow_cpu)
    nothing = not any(candidate.fits for candidate in found.candidates)
    answer = outcome(host, catalog, allow_cpu=allow_cpu)
    assert isinstance(answer, NothingFits) is nothing
    if nothing:
        assert str(answer)
        assert answer.remedy or not catalog.variants
        assert answer.selection.to_json() == found.to_json()
    else:
        assert found.candidates[0].reference == found.selected


@given(hosts, catalogs, allowed, st.randoms())
def test_the_order_of_the_catalog_changes_nothing(host, catalog, allow_cpu, random):
    other = replace(catalog, variants=tuple(random.sample(catalog.variants, len(catalog.variants))))
    one, two = (explain(host, some, allow_cpu=allow_cpu) for some in (catalog, other))
    assert one.to_json() == two.to_json()
    if one.selected is None:
        assert one.decision.refusal == two.decision.refusal


@given(hosts, catalogs, variants, allowed)
def test_one_more_variant_changes_nothing_or_is_selected(host, catalog, variant, allow_cpu):
    before = explain(host, catalog, allow_cpu=allow_cpu).selected
    after = explain(host, plus(catalog, variant), allow_cpu=allow_cpu).selected
    assert after in (before, variant.reference)
    if not fits(host, variant, allow_cpu=allow_cpu):
        assert after == before


@given(hosts, catalogs, st.frozensets(st.sampled_from(sorted(FLAGS["sapphirerapids"] | {"new"}))), allowed)
def test_more_flags_lose_no_variant(host, catalog, more, allow_cpu):
    richer = replace(host, cpu=replace(host.cpu, flags=host.cpu.flags | more))
    for variant in catalog.variants:
        assert fits(richer, variant, allow_cpu=allow_cpu) >= fits(host, variant, allow_cpu=allow_cpu)


@given(hosts, catalogs, allowed)
def test_fewer_gpus_lose_no_gpu_variant(host, catalog, allow_cpu):
    for variant in catalog.variants:
        if variant.gpu and fits(host, variant, allow_cpu=allow_cpu):
            for gpu in host.gpus:
                assert fits(replace(host, gpus=(gpu,)), variant, allow_cpu=allow_cpu)


@given(st.lists(hosts, max_size=6), catalogs, allowed, st.sampled_from([None, "none", "1", "device=0"]))
def test_select_many_is_select_one_by_one(some, catalog, allow_cpu, wanted):
    answers = select_many(some, catalog, gpus=wanted, allow_cpu=allow_cpu)
    for host, answer in zip(some, answers, strict=True):
        expected = outcome(host, replace(catalog), gpus=wanted, allow_cpu=allow_cpu)
        assert type(answer) is type(expected)
        if isinstance(expected, ImagematrixError):
            assert (str(answer), answer.remedy) == (str(expected), expected.remedy)
        else:
            assert answer.to_json() == expected.to_json()


@given(hosts, hosts, catalogs, allowed)
def test_equal_hardware_has_equal_reasons(host, other, catalog, allow_cpu):
    # what a decision must not look at: it is not part of the hardware
    twin = replace(
        host,
        gpus=tuple(replace(gpu, uuid=None, minor=7, memory_mib=1) for gpu in host.gpus),
        cpu=replace(host.cpu, model=other.cpu.model, level="x86-64-v9"),
        devices=("/dev/nvidia0",),
        warnings=("strange",),
    )
    keys = [hardware(one, one.gpus, allow_cpu=allow_cpu) for one in (host, twin)]
    assert keys[0] == keys[1]
    nodes = [Node(host=one, gpus=one.gpus, allow_cpu=allow_cpu) for one in (host, twin)]
    for variant in catalog.variants:
        assert results(nodes[0], variant) == results(nodes[1], variant)
        assert key(order(), nodes[0], variant) == key(order(), nodes[1], variant)


@given(hosts, variants, variants, allowed)
def test_equal_needs_have_equal_verdicts(host, variant, other, allow_cpu):
    node = Node(host=host, gpus=host.gpus, allow_cpu=allow_cpu)
    for rule in RULES:
        need = rule.needs(variant)
        if need is not None and need == rule.needs(other):
            assert rule.holds(node, variant) is rule.holds(node, other)


@given(hosts, catalogs, allowed)
def test_a_nearest_variant_fails_as_few_rules_as_any(host, catalog, allow_cpu):
    found = explain(host, catalog, allow_cpu=allow_cpu)
    if found.selected is None and catalog.variants:
        index = Index(catalog.variants, order(catalog.prefer))
        node = Node(host=host, gpus=kinds(host.gpus), allow_cpu=allow_cpu)
        assert index.nearest(node).reference == found.candidates[0].reference


@given(hosts, catalogs)
@settings(max_examples=200)
def test_the_gpus_named_as_the_cure_are_one(host, catalog):
    remedy = getattr(outcome(host, catalog), "remedy", None) or ""
    if remedy.startswith("pass --gpus ") and ";" not in remedy:
        assert select(host, catalog, gpus=remedy.removeprefix("pass --gpus ")).selected


@given(hosts, catalogs, st.integers(1, 3))
def test_what_serves_a_count_is_all_that_a_variant_for_gpus_fits(host, catalog, count):
    if count > sum(gpu.state == "ok" for gpu in host.gpus):
        return
    sets, same = serving(host, catalog, count)
    assert same == count
    possible = {
        some
        for some in combinations(candidates(host.gpus, count)[0], count)
        if explain(host, catalog, gpus=exactly(some)).variant
    }
    offered = {some for gpus in sets for some in combinations(gpus, count)}
    if possible:
        assert offered == possible
        assert sets[0][:count] == min(possible, key=lambda some: [gpu.index for gpu in some])
    else:
        assert sets == candidates(host.gpus, count)[:1]


@given(hosts, catalogs)
def test_where_there_is_no_choice_serving_makes_none(host, catalog):
    for wanted in (None, "all", "none"):
        found, count = candidates(host.gpus, wanted)
        assert serving(host, catalog, wanted) == ((found,), count)
