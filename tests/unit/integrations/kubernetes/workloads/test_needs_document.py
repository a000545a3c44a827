"""An image's needs in the forms of schedulers, compared with `select`.

Terms on our own labels admit exactly the nodes that a variant fits. Terms on labels of NFD and NVIDIA, and
selectors on attributes of NVIDIA's DRA driver, admit no node or GPU that it does not fit.
"""

from __future__ import annotations

import json
import re
from functools import cache, partial
from random import Random
from typing import Any

import pytest
import strategies
import yaml
from celpy import celtypes
from celpy.evaluation import CELEvalError
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import Cel, Semver, admitted

from imagematrix.common import json_documents
from imagematrix.common.record import replace
from imagematrix.hardware.vendors import marches, versions
from imagematrix.images.catalog.catalog import Catalog, Ptx, UserModeDriver, Variant
from imagematrix.integrations.kubernetes.dra import slices
from imagematrix.integrations.kubernetes.nodes.labels import VOCABULARY
from imagematrix.integrations.kubernetes.workloads import dra_selectors
from imagematrix.integrations.kubernetes.workloads.affinity import (
    get_required_terms,
    is_admitted,
    make_affinity,
    make_terms_for_foreign_labels,
    make_terms_for_our_labels,
)
from imagematrix.integrations.kubernetes.workloads.nvidia_dra_selectors import (
    DRIVER,
    LONGEST,
    join_groups,
    make_nvidia_selector,
)
from imagematrix.selection.needs.need import Need
from imagematrix.selection.needs.node_needs import derive_needs as needs_by
from imagematrix.selection.selector import Selector

needs = partial(needs_by, vocabulary=VOCABULARY)

REQUIRES = (
    (),
    (),
    (),
    ("cuda>=12.4",),
    ("cuda>=12.4 brand=tesla,driver>=535,driver<536 brand=nvidia,driver>=525,driver<526",),
    ("driver!=550.163.01", "arch>=8.0"),
    ("driver=535.261.03 driver<=525.60.13.0",),
    ("driver>550.54 brand!=geforce",),
)


MIB = 1024 * 1024
ARM = [marches.get_required_flags(march, "gcc-14") for march in ("armv8-a", "armv8.2-a", "neoverse-v2")]


def of_its_arch(host, driver):
    """Return a host with another driver, and with flags that its architecture has."""
    flags = (ARM[len(host.cpu.flags) % 3] | marches.SIGNING) if host.arch == "aarch64" else host.cpu.flags
    driver = host.driver and replace(host.driver, version=driver)
    return replace(host, cpu=replace(host.cpu, flags=flags), driver=driver)


def some_variants(count):
    """Return the same variants each time, with every kind of need."""
    random = Random(17)  # noqa: S311 - no secret
    for number in range(count):
        mode, version = random.choice(["exact", "compat", "host"]), random.choice(strategies.DRIVERS)
        branches = random.choice([(535,), (525, 535, 550)])
        platform = random.choice(["linux/amd64"] * 4 + ["linux/arm64"])
        yield Variant(
            reference=f"t:{number}",
            digest=None,
            platform=platform,
            cuda=random.choice(["11.8", "12.0", "12.4", "13.0"]),
            cubins=tuple(random.sample([*strategies.TARGETS, "100f"], random.randint(0, 3))),
            ptx=tuple(
                Ptx(target=random.choice(strategies.TARGETS), isa=random.choice(["8.0", "8.4", "9.0"]))
                for _ in range(random.randint(0, 2))
            ),
            compressed_fatbin=random.random() < 0.3,
            driver=UserModeDriver(
                mode=mode,
                version=None if mode == "host" else version,
                branches=branches if mode == "compat" else (),
                brands=("nvidia", "tesla") if mode == "compat" else (),
            ),
            cpu_flags=random.choice(
                ARM if platform == "linux/arm64" else [*strategies.FLAGS.values(), frozenset()]
            ),
            requires=random.choice(REQUIRES),
            gpu_memory_mib=random.choice(strategies.MEMORY),
        )
    for number, flags in enumerate(strategies.FLAGS.values()):
        yield Variant(reference=f"t:cpu{number}", digest=None, platform="linux/amd64", cpu_flags=flags)


VARIANTS = tuple(some_variants(50))


# The needs of random variants take seconds: they are computed by the tests that use them, and only once.
@cache
def owned_terms(allow_cpu):
    return {one: make_terms_for_our_labels(needs(one, allow_cpu=allow_cpu)) for one in VARIANTS}


@cache
def foreign_terms():
    return {one: make_terms_for_foreign_labels(needs(one, allow_cpu=True, listed=True)) for one in VARIANTS}


@cache
def device_selectors():
    return {
        one: (
            make_terms_for_our_labels([Need(arch=ways[0].arch, flags=ways[0].flags)]),
            make_nvidia_selector(ways),
        )
        for one in VARIANTS
        if (ways := needs(one, listed=True))
    }


@cache
def own_selectors():
    return {
        one: (
            make_terms_for_our_labels([Need(arch=ways[0].arch, flags=ways[0].flags)]),
            dra_selectors.make_selector(ways),
        )
        for one in VARIANTS
        if (ways := needs(one))
    }


wide_drivers = st.sampled_from(
    [*strategies.DRIVERS, "470.57.02", "510.39.01", "530.30.2", "535.261", "590.1.1", "390.46", "550.54.14.1"]
)
hosts = st.builds(of_its_arch, strategies.hosts, wide_drivers)
cel = Cel()


def fits(host, variant, *, allow_cpu=False):
    selector = Selector(Catalog(image="t", version="v1", variants=(variant,)))
    return bool(selector.explain(host, allow_cpu=allow_cpu).fits)


def alike(host):
    """Return a host with only those GPUs that have the first one's model and that NVML would list."""
    some = [gpu for gpu in host.gpus if gpu.state in {"ok", "vgpu"}]
    model = [replace(some[0], index=index) for index in range(len(some))] if some else []
    return replace(host, gpus=tuple(model), accelerators=())


@settings(max_examples=300, deadline=None)
@given(hosts, st.booleans())
def test_our_labels_admit_a_node_if_and_only_if_the_variant_fits(cluster, host, allow_cpu):
    labels, catalog = cluster.own(host), Catalog(image="t", version="v1", variants=VARIANTS)
    right = Selector(catalog).explain(host, allow_cpu=allow_cpu).fits
    mixed = len({(gpu.compute, gpu.brand) for gpu in host.gpus}) > 1
    for variant, ways in owned_terms(allow_cpu).items():
        seen = admitted(ways, labels)
        cautious = mixed and variant.requires
        assert seen == (variant.reference in right) or (cautious and not seen)


@settings(max_examples=300, deadline=None)
@given(hosts.map(alike))
def test_other_labels_admit_no_node_that_the_variant_does_not_fit(cluster, host):
    labels, catalog = cluster.foreign(host), Catalog(image="t", version="v1", variants=VARIANTS)
    right = Selector(catalog).explain(listed(cluster, host), allow_cpu=True).fits
    for variant, ways in foreign_terms().items():
        assert not admitted(ways, labels) or variant.reference in right


@settings(max_examples=40, deadline=None)
@given(hosts.map(alike))
def test_a_device_selector_admits_no_gpu_that_the_variant_does_not_fit(cluster, host):
    seen = listed(cluster, host)
    labels, catalog = cluster.own(seen), Catalog(image="t", version="v1", variants=VARIANTS)
    right = Selector(catalog).explain(seen).fits
    for variant, (cpu, expression) in device_selectors().items():
        if expression and seen.gpus and admitted(cpu, labels):
            assert not all(chosen(expression, seen, gpu) for gpu in seen.gpus) or variant.reference in right


@settings(max_examples=60, deadline=None)
@given(hosts.map(alike))
def test_a_selector_for_our_driver_admits_a_gpu_if_and_only_if_the_variant_fits(cluster, host):
    gpus = tuple(replace(gpu, index=0, minor=0) for gpu in host.gpus[:1])
    host = replace(host, gpus=gpus)
    labels, catalog = cluster.own(host), Catalog(image="t", version="v1", variants=VARIANTS)
    right = Selector(catalog).explain(host).fits
    version = host.driver.version if host.driver else ""
    unordered = versions.is_tegra(version) or version.count(".") == 3
    for device in slices.make_devices(host, {}):
        attributes = own_attributes(device)
        for variant, (cpu, expression) in own_selectors().items():
            seen = bool(expression) and admitted(cpu, labels) and admits_device(expression, attributes)
            assert len(expression or "") < LONGEST
            assert seen == (variant.reference in right) or (unordered and not seen) or not variant.gpu


BIND = re.compile(
    re.escape(f'device.driver == "{slices.DRIVER}" && ').join(["(", ")"])
    + re.escape(f"cel.bind({dra_selectors.NAME}, {slices.ATTRIBUTES}, ")
    + r"(.*)\)"
)


def own_attributes(device):
    """Return a device of our driver as CEL sees it."""
    kinds: dict[str, Any] = {
        "version": numbers,
        "string": celtypes.StringType,
        "int": celtypes.IntType,
        "bool": celtypes.BoolType,
    }
    attributes = {
        celtypes.StringType(name): kinds[kind](value)
        for name, typed in device["attributes"].items()
        if "/" not in name
        for kind, value in typed.items()
    }
    return celtypes.MapType(
        {
            "driver": celtypes.StringType(slices.DRIVER),
            "attributes": celtypes.MapType(
                {celtypes.StringType(slices.DRIVER): celtypes.MapType(attributes)}
            ),
        }
    )


def admits_device(expression, device):
    """Whether an expression admits a device. An error would fail the test, as it would fail the scheduler."""
    # The library has no cel.bind, which gives a value a name in an expression.
    bound = BIND.fullmatch(expression)
    gpu = device["attributes"][celtypes.StringType(slices.DRIVER)]
    return bool(cel(bound[1] + bound[2] if bound else expression, device=device, gpu=gpu))


def listed(cluster, host):
    """Return a host with only the GPUs that NVIDIA's software lists."""
    return replace(host, gpus=tuple(gpu for gpu in host.gpus if host.driver and cluster.listed(host, gpu)))


def chosen(expression, host, gpu):
    """Whether a device selector admits a GPU with the attributes that NVIDIA's driver publishes."""
    if gpu.compute is None or gpu.brand is None or gpu.state == "vgpu":
        return False  # the driver would not publish such a device
    if versions.is_tegra(host.driver.version) or len(host.driver.version.split(".")) > 3:
        return False
    attributes = celtypes.MapType(
        {
            "driverVersion": numbers(host.driver.version),
            "cudaComputeCapability": numbers(gpu.compute),
            "brand": celtypes.StringType(gpu.brand.capitalize()),
            "productName": celtypes.StringType(gpu.name or "unknown"),
        }
    )
    capacity = celtypes.MapType({"memory": celtypes.IntType((gpu.least_memory_mib or 0) * MIB)})
    device = celtypes.MapType(
        {
            "driver": celtypes.StringType(DRIVER),
            "attributes": celtypes.MapType({celtypes.StringType(DRIVER): attributes}),
            "capacity": celtypes.MapType({celtypes.StringType(DRIVER): capacity}),
        }
    )
    return bool(cel(expression, device=device))


def numbers(version):
    return Semver((*map(int, version.split(".")), 0, 0)[:3])


def test_every_profile_and_every_shipped_variant(hosts, cluster, shipped_catalog):
    labels = {name: (cluster.own(host), cluster.foreign(host)) for name, host in hosts.items()}
    uniform = {name for name, host in hosts.items() if len({gpu.compute for gpu in host.gpus}) < 2}
    placed = 0
    for variant in shipped_catalog.variants:
        ways = needs(variant)
        exact = make_terms_for_our_labels(ways)
        cautious = make_terms_for_foreign_labels(needs(variant, listed=True))
        for name, host in hosts.items():
            right = fits(host, variant)
            assert admitted(exact, labels[name][0]) == right
            if name in uniform and admitted(cautious, labels[name][1]):
                placed += 1
                assert right
    assert placed > 0


def test_a_need_of_memory_in_each_form(make):
    variant = make.variant(gpu_memory_mib=24576)
    (term,) = make_terms_for_our_labels(needs(variant))
    assert {"key": "imagematrix.io/gpu.memory-min", "operator": "Gt", "values": ["24575"]} in term
    (term,) = make_terms_for_foreign_labels(needs(variant, listed=True))
    assert {"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": ["24575"]} in term
    expression = make_nvidia_selector(needs(variant, listed=True))
    assert 'device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("24576Mi")) >= 0' in expression
    assert '"memoryMib" in gpu && gpu.memoryMib >= 24576' in dra_selectors.make_selector(needs(variant))


def test_an_exact_driver_and_a_cubin_take_few_requirements(make):
    (term,) = make_terms_for_our_labels(needs(make.variant(cpu_flags=make.flags("x86-64-v3"))))
    assert [(one["key"].partition("/")[2], one["operator"], one.get("values")) for one in term] == [
        ("arch", "In", ["amd64"]),
        ("cpu.level", "Gt", ["2"]),
        ("cpu-flag.xsave", "Exists", None),
        ("driver", "In", ["550.163.01"]),
        ("gpu.states", "In", ["ok"]),
        ("gpu.compute-min", "Gt", ["88"]),
        ("gpu.compute-max", "Lt", ["90"]),
        ("gpu.driver-limit", "Gt", ["549"]),
    ]


def test_the_affinity_of_a_pod(make):
    terms = make_terms_for_our_labels(needs(make.variant()))
    spec = {"affinity": make_affinity(terms)}
    assert [tuple(term["matchExpressions"]) for term in get_required_terms(spec)] == list(terms)
    assert get_required_terms({}) is None
    assert get_required_terms({"affinity": None}) is None


def test_the_numeric_order_of_drivers_counts_for_devices_only(make):
    variant = make.variant(driver=make.umd("exact", "580.65.06"))
    assert 'semver("580.65.6")' in make_nvidia_selector(needs(variant, listed=True))
    assert make_terms_for_our_labels(needs(variant))[0][1]["values"] == ["580.65.06"]
    assert make_nvidia_selector(needs(make.cpu_variant(), listed=True)) is None


def test_a_selector_for_our_driver_compares_texts(make):
    variant = make.variant(driver=make.umd("exact", "580.65.06"))
    expression = dra_selectors.make_selector(needs(variant))
    assert expression.startswith('device.driver == "gpu.imagematrix.io" && ')
    assert 'gpu.driver == "580.65.06"' in expression
    assert dra_selectors.make_selector(needs(make.cpu_variant())) is None
    assert dra_selectors.make_selector([]) is None
    assert dra_selectors.make_selector([Need(arch="amd64", gpus=True, loaded=False)]) == "false"


def test_needs_that_other_labels_cannot_express_have_no_terms(make):
    compat = make.variant(driver=make.umd("compat", "560.35.05"))
    assert make_terms_for_foreign_labels(needs(compat, listed=True)) == ()
    assert make_terms_for_foreign_labels(needs(make.cpu_variant(), listed=True)) == ()
    assert make_terms_for_foreign_labels(needs(make.cpu_variant(), allow_cpu=True, listed=True)) != ()
    assert (
        make_terms_for_foreign_labels(needs(make.variant(cpu_flags=frozenset(["clwb"])), listed=True)) == ()
    )


@pytest.mark.parametrize("oldest", [(0,), (0, 0), (0, 0, 0)])
def test_every_driver_is_at_least_zero(oldest):
    """A document of a host, or a label, can have any version."""
    need, without = (Need(arch="amd64", gpus=True, oldest=version) for version in (oldest, None))
    assert make_terms_for_foreign_labels([need]) == make_terms_for_foreign_labels([without])


def test_an_image_of_unknown_code_needs_a_gpu_that_works(make, cluster):
    variant = make.variant(cubins=(), facts=(("cubins", "unknown"),))
    terms = make_terms_for_our_labels(needs(variant))
    assert admitted(terms, cluster.own(make.host(make.gpu(0))))
    assert not admitted(terms, cluster.own(make.host(make.gpu(0, state="lost"))))
    assert not admitted(terms, cluster.own(make.host()))


@pytest.mark.parametrize("expression", ['semver("1.2.3").compareTo(semver("1.2.10")) < 0'])
def test_the_evaluator_of_cel(expression):
    assert cel(expression) == celtypes.BoolType(True)
    with pytest.raises(CELEvalError):
        cel("nothing")


def test_the_command(cli, make, tmp_path, conforms):
    path = tmp_path / "t.json"
    path.write_text(json_documents.dump_json(make.catalog(make.variant("t:a"), make.cpu_variant()).to_json()))
    result = cli("kubernetes", "needs", "t:v1", "--catalog", str(path), "--json")
    document = conforms(json.loads(result.out))
    assert [one["device"] is None for one in document["variants"]] == [False, True]
    assert yaml.safe_load(cli("kubernetes", "needs", "t:v1", "--catalog", str(path)).out) == document
    ours = cli("kubernetes", "needs", "t:v1", "--catalog", str(path), "--dra-driver", slices.DRIVER, "--json")
    assert slices.DRIVER in json.loads(ours.out)["variants"][0]["device"]
    assert "invalid --dra-driver" in cli("kubernetes", "needs", "t:v1", "--dra-driver", "x").err
    only = cli("kubernetes", "needs", "t:v1", "--catalog", str(path), "--where", "cuda=12.4", "--json")
    assert [one["reference"] for one in json.loads(only.out)["variants"]] == ["t:a"]


CODES = ("50", "52", "60", "61", "70", "75", "80", "86", "89", "90", "100", "120")


def with_branches(make, branches):
    """Return a variant for all GPUs that asks for one of some driver branches, as NVIDIA's images do."""
    brands = ("grid", "nvidia", "quadro", "tesla", "unknown", "vws")
    ways = [f"brand={one},driver>={first},driver<{first + 1}" for first in branches for one in brands]
    requires = (" ".join(["cuda>=12.8", *ways]),) if ways else ()
    facts = {"cuda": "12.8", "cubins": CODES, "ptx": [("120", "8.7")], "requires": requires}
    return make.variant("t:a", driver=make.umd("host"), **facts)


@pytest.mark.parametrize("branches", [(), (470, 535, 550, 565)])
def test_an_image_for_all_gpus_has_a_selector_that_kubernetes_admits(make, branches):
    expression = dra_selectors.make_selector(needs(with_branches(make, branches)))
    assert 1000 < len(expression) <= LONGEST


def test_a_selector_that_is_too_long_is_an_error(cli, make, tmp_path):
    path = tmp_path / "t.json"
    catalog = make.catalog(with_branches(make, range(530, 570, 2)))
    path.write_text(json_documents.dump_json(catalog.to_json()))
    words = ("kubernetes", "needs", "t:v1", "--catalog", str(path))
    cli(*words, "--dra-driver", slices.DRIVER).fails(
        2, "t:a: its selector for devices of gpu.imagematrix.io would have"
    )
    assert cli(*words).code == 0


@given(
    st.lists(st.lists(st.sampled_from("abcdef"), unique=True), min_size=1, max_size=8),
    st.sets(st.sampled_from("abcdef")),
)
def test_groups_whose_conditions_are_written_once_mean_the_same(groups, true):
    expression = join_groups(groups).replace("&&", " and ").replace("||", " or ").replace("true", "True")
    found = eval(expression, {name: name in true for name in "abcdef"})  # noqa: S307 - made above
    assert found == any(true.issuperset(group) for group in groups)


def test_needs_that_attributes_cannot_express_admit_no_device(make):
    assert (
        make_nvidia_selector(needs(make.variant(driver=make.umd("exact", "550.54.14.1")), listed=True))
        == "false"
    )
    but_one = make_nvidia_selector(
        needs(make.variant(driver=make.umd("host"), requires=("driver!=550.163.01",)), listed=True)
    )
    assert 'driverVersion.compareTo(semver("550.163.1")) < 0' in but_one
    assert 'driverVersion.compareTo(semver("550.163.2")) >= 0' in but_one
    assert make_nvidia_selector(needs(make.variant(requires=("brand=nvidia",)), listed=True)) == "false"
    dropped = make.variant(driver=make.umd("compat", "590.1.1"), cubins=("70",))
    assert "7.0.0" not in (make_nvidia_selector(needs(dropped, listed=True)) or "")
    unknown = make.variant(cubins=(), facts=(("cubins", "unknown"),))
    # Any GPU that the driver does not predate.
    assert '.cudaComputeCapability.compareTo(semver("10.0.0")) < 0' in make_nvidia_selector(
        needs(unknown, listed=True)
    )


requirements = st.builds(
    lambda operator, values: {"key": "k", "operator": operator, "values": values},
    st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]),
    st.lists(st.sampled_from(["1", "-2", "x", "10"]), min_size=1, max_size=2),
)


@given(
    st.lists(st.lists(requirements, max_size=2), max_size=2),
    st.sampled_from([{}, *({"k": value} for value in ("1", "2", "-3", "x", ""))]),
)
def test_affinity_is_evaluated_as_by_the_scheduler(some, labels):
    terms = [tuple(term) for term in some]
    assert is_admitted(terms, labels) == admitted(terms, labels)
