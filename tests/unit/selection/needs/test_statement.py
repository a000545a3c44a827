"""A statement for a system that knows only some facts, compared with `select`.

A node that meets the statement, and for which the assumptions hold, is selected for: random nodes are made so
that the assumptions hold, and the test reads the conditions of a statement by itself.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from random import Random

import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st

from imagematrix.common.record import replace
from imagematrix.hardware.host.host import Cpu, Driver, Gpu, Host
from imagematrix.hardware.vendors import cuda, gpus, marches, versions
from imagematrix.images.catalog.catalog import Catalog, Ptx, UserModeDriver, Variant
from imagematrix.integrations.kubernetes.nodes.labels import VOCABULARY
from imagematrix.selection.needs import node_needs
from imagematrix.selection.needs.equivalence import TruthScale
from imagematrix.selection.needs.knowledge import Knowledge, list_words
from imagematrix.selection.needs.node_needs import derive_needs
from imagematrix.selection.needs.statement import (
    Alternative,
    derive_statement,
    find_limiting_rules,
    find_missing_facts,
    list_assumptions,
    split_flags,
)
from imagematrix.selection.rules import RULES
from imagematrix.selection.selector import Selector

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from imagematrix.selection.needs.need import Need

MARCHES = ("x86-64", "x86-64-v3", "x86-64-v4", "znver4")
FLAGS = [marches.get_required_flags(march, "gcc-14") for march in MARCHES]
DRIVERS = [
    *("450.80.02", "470.256.02", "525.60.13", "530.30.02", "535.54.02", "535.261.03", "545.23.08"),
    *("550.54.13", "550.54.14", "550.163.01", "555.42.01", "560.35.05", "570.195.03", "580.65.06"),
    *("580.119.02", "590.48.01", "610.10.01", "999.1.1"),
]
VERSIONS = sorted({*DRIVERS, *cuda.list_first_drivers().values()})
TARGETS = ("50", "70", "75", "80", "86", "89", "90", "90a", "100f", "120")
REQUIRES = (
    (),
    (),
    ("cuda>=12.8 brand=tesla,driver>=535,driver<536 brand=nvidia,driver>=535,driver<536",),
    ("driver>=525,driver<581",),
    ("arch>=8.0",),
    ("brand!=geforce",),
)
WORDS = (
    {"cuda", "gpu-name"},
    {"cuda", "gpu-compute", "cpu-level"},
    {"driver", "gpu-name", "cpu-flags", "arch"},
    {"driver", "gpu-compute", "gpu-brand", "gpu-state"},
    {"driver", "gpu-name", "driver-kind", "driver-user-mode-differs", "accelerators"},
    {"cuda"},
    {"gpu-name"},
)
KNOWLEDGE = [Knowledge(vocabulary=VOCABULARY, words=frozenset(words)) for words in WORDS]
PRODUCTS = gpus.list_products()
OTHER_BRANDS = ("geforce", "geforcertx", "quadro", "nvidiartx", "nvidia", "titan", "unknown", None)


def some_variants(count):
    """Return the same variants each time, with every kind of need."""
    random = Random(23)  # noqa: S311 - no secret
    for number in range(count):
        mode = ["host", "host", "compat", "exact"][number % 4]
        driver = random.choice(["550.163.01", "580.65.06", "560.35.05"])
        yield Variant(
            reference=f"t:{number}",
            digest=None,
            platform="linux/amd64",
            cuda=random.choice([None, "11.8", "12.4", "13.0"]),
            cubins=tuple(random.sample(TARGETS, random.randint(0, 4))),
            ptx=tuple(
                Ptx(target=random.choice(["50", "80", "90"]), isa=random.choice(["7.0", "8.4", "9.0"]))
                for _ in range(random.randint(0, 1))
            ),
            compressed_fatbin=random.random() < 0.3,
            driver=UserModeDriver(
                mode=mode,
                version=None if mode == "host" else driver,
                branches=(470, 535, 550) if mode == "compat" else (),
                brands=("nvidia", "tesla") if mode == "compat" else (),
            ),
            cpu_flags=random.choice(FLAGS),
            requires=random.choice(REQUIRES),
        )
    yield Variant(reference="t:cpu", digest=None, platform="linux/amd64", cpu_flags=FLAGS[1])


VARIANTS = tuple(some_variants(12))
CATALOG = Catalog(image="t", version="v1", variants=VARIANTS)


@cache
def statements(number):
    return {variant: derive_statement(variant, KNOWLEDGE[number]) for variant in VARIANTS}


@st.composite
def nodes(draw):
    """Return a host for which every assumption holds but those about the CPU, and the names of its GPUs."""
    version = draw(st.sampled_from(VERSIONS))
    kind = draw(st.sampled_from([None, "open", "proprietary"]))
    driven = [
        product
        for product in PRODUCTS
        if gpus.is_supported(kind, product.compute)
        and (product.last_branch is None or product.last_branch >= versions.get_branch(version))
    ]
    chosen = draw(st.lists(st.sampled_from(driven), max_size=2))
    members = tuple(
        Gpu(
            index=index,
            name=f"NVIDIA {product.name}",
            pci_device_id=product.pci_device_id,
            compute=product.compute,
            brand=draw(
                st.sampled_from(
                    sorted(gpus.DATA_CENTRE_BRANDS) if gpus.get_brand(product.name) else OTHER_BRANDS
                )
            ),
        )
        for index, product in enumerate(chosen)
    )
    host = Host(
        arch="x86_64",
        cpu=Cpu(vendor=None, model=None, flags=draw(st.sampled_from(FLAGS)), level=None),
        driver=Driver(
            version=version, kind=kind, source="test", user_mode=draw(st.sampled_from([None, version]))
        ),
        gpus=members,
    )
    return host, [product.name for product in chosen]


def meets(alternative: Alternative, knowledge: Knowledge, host: Host, names: list[str]) -> bool:
    """Whether a node meets an alternative and its assumption about CPUs, by what the system knows of it."""
    need, words = alternative.need, knowledge.words
    level, flags, assumed = split_flags(need, knowledge)
    on_level = marches.get_level_rank(marches.get_level(host.cpu.flags)) >= marches.get_level_rank(level)
    if not (on_level and flags | assumed <= host.cpu.flags):
        return False
    if need.gpus is not None and need.gpus != bool(host.gpus):
        return False
    if "gpu-name" in words and need.gpus and not {*names} <= {*alternative.gpu_names}:
        return False
    codes = {int(str(gpu.compute).replace(".", "")) for gpu in host.gpus}
    if need.computes is not None and not codes <= {*need.computes}:
        return False
    told = {
        "brands": [gpu.brand or "none" for gpu in host.gpus],
        "states": [gpu.state for gpu in host.gpus],
        "modules": [host.driver.kind],
    }
    for field, values in told.items():
        admitted = getattr(need, field)
        if admitted is not None and not {*values} <= {*admitted}:
            return False
    return knows_driver(need, words, host.driver.version)


def knows_driver(need: Need, words: frozenset[str], version: str) -> bool:
    if not words & {"driver", "cuda"}:
        return need.driver is None
    key = versions.make_sort_key(version)
    if need.driver is not None or version in need.other_than:
        return version == need.driver
    if "driver" not in words:
        # The system sees the release of the driver, so its conditions begin and end with releases.
        release = cuda.get_newest_cuda(version)
        key = versions.make_sort_key(cuda.list_first_drivers()[release]) if release else ()
    return (need.oldest is None or key >= need.oldest) and (need.below is None or key < need.below)


@pytest.mark.parametrize("number", range(len(WORDS)))
@settings(max_examples=40, deadline=None)
@given(node=nodes())
def test_a_node_that_meets_a_statement_and_its_assumptions_is_selected_for(number, node):
    host, names = node
    right = Selector(CATALOG).explain(host).fits
    for variant, statement in statements(number).items():
        if any(meets(alternative, KNOWLEDGE[number], host, names) for alternative in statement):
            assert variant.reference in right


@settings(max_examples=60, deadline=None)
@given(node=nodes())
def test_names_and_drivers_lose_no_node_that_fits_a_variant_with_a_driver_of_the_node(node):
    """A statement in names, drivers and CPU flags admits a node whenever all GPUs of these names fit."""
    host, names = node
    right = Selector(CATALOG).explain(host).fits
    for variant, statement in statements(2).items():
        plain = variant.driver and variant.driver.mode == "host" and not variant.requires
        if plain and variant.reference in right and len({gpu.compute for gpu in host.gpus}) == 1:
            same_name = {product.compute for product in PRODUCTS if product.name == names[0]}
            assert (
                len(same_name) > 1
                or len({*names}) > 1
                or any(meets(alternative, KNOWLEDGE[2], host, names) for alternative in statement)
            )


def holds(need: Need, host: Host) -> bool:
    """Whether a need holds for a node of which everything is known."""
    platform = {"x86_64": "amd64", "aarch64": "arm64"}[host.arch]
    return (
        platform == need.arch
        and need.flags <= host.cpu.flags
        and not need.without & host.cpu.flags
        and need.gpus in (None, bool(host.gpus))
        and need.accelerators in (None, bool(host.accelerators))
        and holds_for_gpus(need, host.gpus)
        and (holds_for_driver(need, host.driver) if host.driver else has_no_driver_condition(need))
    )


def holds_for_gpus(need: Need, members: tuple[Gpu, ...]) -> bool:
    told: list[tuple[tuple[Any, ...] | None, set[Any]]] = [
        (need.computes, {int(gpu.compute.replace(".", "")) if gpu.compute else -1 for gpu in members}),
        (need.states, {gpu.state for gpu in members}),
        (need.brands, {gpu.brand or "none" for gpu in members}),
    ]
    ends = [gpu.last_branch for gpu in members if gpu.last_branch is not None]
    return (
        all(admitted is None or values <= {*admitted} for admitted, values in told)
        and (not need.data_centre or all(gpu.data_centre for gpu in members))
        and all(end >= (need.limit or 0) for end in ends)
    )


def has_no_driver_condition(need: Need) -> bool:
    conditions = (need.driver, need.oldest, need.below, need.modules, need.differs)
    return need.loaded is not True and all(condition is None for condition in conditions)


def holds_for_driver(need: Need, driver: Driver) -> bool:
    if versions.is_tegra(driver.version) and (need.driver or need.oldest or need.below):
        return need.driver == driver.version
    return (
        need.loaded is not False
        and (need.modules is None or driver.kind in need.modules)
        and need.differs in (None, driver.user_mode_differs)
        and knows_driver(need, frozenset({"driver"}), driver.version)
    )


@cache
def full_needs():
    return {variant: derive_needs(variant, VOCABULARY) for variant in VARIANTS}


@settings(max_examples=150, deadline=None)
@given(host=strategies.hosts)
def test_with_all_facts_a_node_meets_the_needs_if_and_only_if_it_is_selected_for(host):
    right = Selector(CATALOG).explain(host).fits
    mixed = len({(gpu.compute, gpu.brand) for gpu in host.gpus}) > 1
    for variant, needs in full_needs().items():
        seen = any(holds(need, host) for need in needs)
        tegra = host.driver and versions.is_tegra(host.driver.version)
        cautious = (mixed and variant.requires) or tegra
        assert seen == (variant.reference in right) or (cautious and not seen)


def test_statements_of_each_kind_exist():
    """So the property above is about something."""
    found = [sum(map(bool, statements(number).values())) for number in range(len(WORDS))]
    assert all(found[:5])
    assert found[0] <= found[2]


def known(*words, **facts):
    return Knowledge(vocabulary=VOCABULARY, words=frozenset(words), **facts)


def test_a_release_has_to_fit_with_all_its_drivers(make):
    variant = make.variant(driver=make.umd("host"), cubins=("90",), requires=("driver>=535.100",))
    (alternative,) = derive_statement(variant, known("cuda", "gpu-compute"))
    assert alternative.need.oldest == (545, 23, 6)
    assert alternative.need.computes == (90,)
    assert find_limiting_rules(variant, alternative) == ("nvidia-require",)


def test_names_of_a_system_are_matched_with_products(make):
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA B200", "NVIDIA H100 NVL", "Some Card 3000")
    variant = make.variant(driver=make.umd("host"), cubins=("90",))
    (alternative,) = derive_statement(variant, known("cuda", "gpu-name", gpu_names=names))
    assert alternative.gpu_names == ("NVIDIA H100 80GB HBM3", "NVIDIA H100 NVL")
    assert find_limiting_rules(variant, alternative) == ("driver-cuda",)


def test_the_last_driver_of_a_gpu_is_no_condition(make):
    """A node whose driver no longer supports its GPU does not have that GPU for anybody."""
    names = ("Tesla V100-SXM2-16GB",)
    variant = make.variant(driver=make.umd("host"), cubins=("70",))
    (alternative,) = derive_statement(variant, known("cuda", "gpu-name", gpu_names=names))
    assert alternative.need.below is None
    compat = make.variant(driver=make.umd("compat", "590.48.01", branches=(535,)), cubins=("70",))
    assert not derive_statement(compat, known("driver", "gpu-name", gpu_names=names))


@pytest.mark.parametrize(
    ("facts", "words", "missing"),
    [
        ({"driver": "host"}, ("cuda",), {("gpu-name",), ("gpu-compute",)}),
        ({"driver": "host"}, ("gpu-name",), {("cuda",), ("driver",)}),
        ({"driver": "exact"}, ("cuda", "gpu-name"), {("driver",)}),
        ({"driver": "compat"}, ("driver", "gpu-compute"), {("gpu-name",)}),
        ({"driver": "host", "requires": ("brand=geforce",)}, ("driver", "gpu-name"), {("gpu-brand",)}),
        ({"driver": "host", "requires": ("brand=geforce",)}, ("driver", "gpu-compute"), {("gpu-brand",)}),
        ({"driver": "host", "cubins": ()}, ("cuda",), set()),
    ],
)
def test_what_is_missing(make, facts, words, missing):
    umd = make.umd(facts["driver"], None if facts["driver"] == "host" else "550.163.01")
    cubins, requires = facts.get("cubins", ("80",)), facts.get("requires", ())
    variant = make.variant(driver=umd, cubins=cubins, requires=requires)
    assert not derive_statement(variant, known(*words))
    assert {*find_missing_facts(variant, known(*words))} == missing


def test_what_is_assumed(make):
    variant = make.variant(driver=make.umd("host"), cpu_flags=make.flags("x86-64-v3"))

    def assumed(*words):
        statement = derive_statement(variant, known(*words))
        return [assumption.fact for assumption in list_assumptions(variant, known(*words), statement)]

    everything = assumed("cuda", "gpu-name")
    assert everything[:2] == ["arch", "cpu-flags"]
    assert {*everything[2:]} == {
        *("driver-kind", "driver-user-mode-differs", "gpu-state", "driver", "gpu-name")
    }
    words = [word for word in list_words(VOCABULARY) if word not in ("cuda", "gpu-compute", "cpu-level")]
    assert assumed(*words) == ["gpu-name"]


def test_a_new_rule_has_to_hold_for_all_values_of_a_fact_that_the_system_does_not_know(make, monkeypatch):
    (fatbin,) = [rule for rule in RULES if rule.name == "fatbin"]

    def add_rule(is_satisfied):
        rule = replace(
            fatbin,
            name="made-up",
            need=lambda variant: (is_satisfied, variant.cuda),
            thresholds=lambda _: {"gpus.large": (True,)},
            is_satisfied=lambda target, _: all(is_satisfied(gpu.large) for gpu in target.gpus),
        )
        monkeypatch.setattr(node_needs, "RULES", (*RULES, rule))

    vocabulary = dataclasses.replace(VOCABULARY, scales={**VOCABULARY.scales, "gpus.large": TruthScale()})
    told = Knowledge(vocabulary=vocabulary, words=frozenset({"cuda", "gpu-name"}), gpu_names=("NVIDIA L4",))
    assert "gpu-large" in list_words(vocabulary)
    variant = make.variant(driver=make.umd("host"))
    add_rule(lambda large: large in (True, False))
    assert derive_statement(variant, told)
    add_rule(lambda large: large)
    assert not derive_statement(variant, told)
