"""A rule that is added as docs/development.md says, and nothing else, is obeyed everywhere."""

from __future__ import annotations

import json
import operator
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import admitted

import imagematrix
from imagematrix.common.record import replace
from imagematrix.hardware.vendors import marches, versions
from imagematrix.images.catalog.catalog import UserModeDriver, Variant
from imagematrix.integrations.kubernetes.nodes.labels import MODULE_KINDS, VOCABULARY
from imagematrix.integrations.kubernetes.workloads.affinity import make_terms_for_our_labels
from imagematrix.selection.candidate import evaluate_rules
from imagematrix.selection.needs import node_needs as deriving
from imagematrix.selection.rule import Rule
from imagematrix.selection.rules import RULES
from imagematrix.selection.selection_target import Target

needs = partial(deriving.derive_needs, vocabulary=VOCABULARY)

RULE = '''\
"""`made-up`: it holds for some hosts. Otherwise the test knows. Source: https://example.org."""

from __future__ import annotations

from imagematrix.hardware.vendors import versions
from imagematrix.selection.rule import Rule


def need(variant):
    return "made up" if {applies} else None


def is_satisfied(target, variant):
    return {holds}


def thresholds(variant):
    return {turns!r}


def reason(target, variant, *, ok):
    return "made up", None, "it is made up", None if ok else "use another host"


def distance(target, variant):
    return (1,)


RULE = Rule(
    name="made-up",
    facts={facts!r},
    parts=("cuda",),
    fact="cuda",
    need=need,
    is_satisfied=is_satisfied,
    thresholds=thresholds,
    reason=reason,
    distance=distance,
)
'''
ANSWERS = """
import json, sys

from imagematrix.images.catalog.catalog import Catalog
from imagematrix.selection.fleet.coverage import compute_coverage
from imagematrix.integrations.kubernetes.admission import admission
from imagematrix.integrations.kubernetes.nodes.classes import classify_nodes
from imagematrix.integrations.kubernetes.nodes.labels import make_labels
from imagematrix.integrations.kubernetes.nodes.nodes import parse_nodes
from imagematrix.integrations.kubernetes.workloads.needs_document import make_needs_document
from imagematrix.hardware.host.host import Host
from imagematrix.selection.selector import explain

asked = json.load(sys.stdin)
catalog = Catalog.from_json(asked["catalog"])
hosts = {name: Host.from_json(host) for name, host in asked["hosts"].items()}
labels = {name: make_labels(host) for name, host in hosts.items()}
labels = {name: own | {"kubernetes.io/arch": own["imagematrix.io/arch"]} for name, own in labels.items()}
nodes = [{"kind": "Node", "metadata": {"name": name, "labels": own}} for name, own in labels.items()]
grouped = classify_nodes(parse_nodes({"kind": "List", "items": nodes}, "x"), catalog)
policy = admission.make_policy("t", grouped)
covered = compute_coverage(hosts, catalog)


def admission_of(name):
    pod = {"spec": {"nodeName": name, "containers": [{"image": "t"}]}}
    return [one["value"] for one in admission.admit(pod, policy).patch if one["path"].endswith("/image")]


json.dump(
    {
        "answers": {name: explain(host, catalog).to_json() for name, host in hosts.items()},
        "covered": {one.reference: one.hosts for one in covered.variants},
        "images": {name: admission_of(name) for name in hosts},
        "labels": labels,
        "needs": make_needs_document(catalog) if asked["needs"] else None,
    },
    sys.stdout,
)
"""


class Case(NamedTuple):
    """A rule: what it states, and its verdict as an expression."""

    turns: dict[str, list[Any]]
    holds: str
    applies: str = "True"

    @property
    def source(self) -> str:
        return RULE.format(applies=self.applies, holds=self.holds, turns=self.turns, facts=tuple(self.turns))


VERSION, KIND = "target.kernel_driver", "target.host.driver and target.host.driver.kind"
CASES = {
    "driver": Case(
        {"driver.version": ["560.35.3"]}, f"{VERSION} and versions.make_sort_key({VERSION}) < (560, 35, 3)"
    ),
    "driver as text": Case({"driver.version": ["560.35.03"]}, f"{VERSION} != '560.35.03'"),
    "one driver for GPUs": Case(
        {"driver.version": ["560.35.03"]}, f"{VERSION} == '560.35.03'", "variant.gpu"
    ),
    "modules": Case({"driver.kind": ["open"]}, f"({KIND}) == 'open'", "variant.gpu"),
    "compute": Case({"gpus.compute": ["9.0"]}, "all(gpu.compute == '9.0' for gpu in target.gpus)"),
    "brand": Case({"gpus.brand": ["geforce"]}, "all(gpu.brand != 'geforce' for gpu in target.gpus)"),
    "state": Case({"gpus.state": ["vgpu"]}, "all(gpu.state != 'vgpu' for gpu in target.gpus)"),
    "a flag is refused": Case({"cpu.flags": ["avx512f"]}, "'avx512f' not in target.host.cpu.flags"),
    "one of two flags": Case(
        {"cpu.flags": ["avx_vnni", "avx512_vnni"]},
        "not target.host.cpu.flags.isdisjoint({'avx_vnni', 'avx512_vnni'})",
    ),
    "arch": Case({"arch": ["aarch64"]}, "target.host.arch != 'aarch64'"),
}


@pytest.fixture(scope="module")
def ask(tmp_path_factory, make):
    """Return what a copy of the package with one more rule answers, or its error."""
    package = Path(imagematrix.__file__).parent
    copy = tmp_path_factory.mktemp("copy") / "imagematrix"
    shutil.copytree(package, copy)  # with the bytecode, because -B below writes none
    rules = copy / "selection" / "rules"
    listed = (rules / "__init__.py").read_text()
    listed = listed.replace("    platform,\n", "    made_up,\n    platform,\n")
    listed = listed.replace("    nvidia_require.RULE,\n", "    nvidia_require.RULE,\n    made_up.RULE,\n")
    (rules / "__init__.py").write_text(listed)

    def answers(case, hosts, *variants, needs=True):
        (rules / "made_up.py").write_text(case.source)
        asked = {"catalog": make.catalog(*variants).to_json(), "hosts": {}, "needs": needs}
        asked["hosts"] = {name: host.to_json() for name, host in hosts.items()}
        return subprocess.run(
            [sys.executable, "-B", "-c", ANSWERS],
            cwd=copy.parent,
            env={**os.environ, "PYTHONPATH": str(copy.parent)},
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            check=False,
        )

    return answers


@pytest.fixture(scope="module")
def fleet(make):
    """Hosts that differ in every fact that a made-up rule reads."""
    gpu = make.gpu(0, pci_device_id="26b9")
    drivers = ("550.163.01", "560.35.02", "560.35.03", "560.35.3", "560.35.05", "580.65.06")
    gpus = {
        "h100": replace(gpu, compute="9.0"),
        "geforce": replace(gpu, brand="geforce"),
        "virtual": replace(gpu, state="vgpu"),
        "unknown": replace(gpu, compute=None, brand=None),
    }
    hosts = {
        **{f"driver-{number}": make.host(gpu, driver=driver) for number, driver in enumerate(drivers)},
        **{kind: make.host(gpu, kind=kind) for kind in ("open", "proprietary")},
        **{name: make.host(one) for name, one in gpus.items()},
        "two": make.host(gpu, replace(gpus["h100"], index=1, minor=1, uuid="GPU-1")),
        "no-driver": make.host(driver=None),
        "no-avx512": make.host(gpu, march="x86-64-v3"),
        "vnni": make.host(gpu, march="sapphirerapids"),
        "arm": make.host(gpu, arch="aarch64", march="armv8.2-a"),
        "arm-cpu": make.host(driver=None, arch="aarch64", march="armv8.2-a"),
        "old-cpu": make.host(driver=None, march="x86-64-v3"),
    }
    return {name: replace(host, warnings=()) for name, host in hosts.items()}


@pytest.fixture(scope="module")
def variants(make):
    gpu = {"cubins": ("89", "90"), "driver": make.umd("host")}
    return (
        make.variant("t:host", **gpu),
        make.variant("t:exact", cubins=("89", "90"), driver=make.umd("exact", "560.35.03")),
        make.variant("t:arm", platform="linux/arm64", **gpu),
        make.cpu_variant("t:cpu"),
        make.cpu_variant("t:cpu-arm", platform="linux/arm64"),
        make.cpu_variant("t:cpu-v3", cpu_flags=make.flags("x86-64-v3")),
    )


@pytest.mark.parametrize("name", CASES)
def test_a_rule_on_a_fact_that_labels_carry_is_obeyed_everywhere(ask, fleet, variants, name):
    result = ask(CASES[name], fleet, *variants)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    refused = 0
    for host, selection in told["answers"].items():
        fits = {one["reference"] for one in selection["candidates"] if one["fits"]}
        reasons = {one["reference"]: one["rules"] for one in selection["candidates"]}
        for variant in told["needs"]["variants"]:
            reference = variant["reference"]
            terms = [term["matchExpressions"] for term in variant["terms"]]
            assert admitted(terms, told["labels"][host]) == (reference in fits), (host, reference)
            failed = [one["rule"] for one in reasons[reference] if not one["ok"]]
            refused += failed == ["made-up"]
        covered = [reference for reference, hosts in told["covered"].items() if host in hosts]
        assert covered == [selection["selected"]] if selection["selected"] else covered == []
        assert told["images"][host] == ([selection["selected"]] if selection["selected"] else [])
    assert refused > 0


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (Case({"gpus.memory_mib": []}, "all(gpu.memory_mib for gpu in target.gpus)"), "gpus.memory_mib"),
        (Case({"cpu.model": ["x"]}, "target.host.cpu.model != 'x'"), "cpu.model"),
        (Case({"cpu.flags": ["hle"]}, "'hle' not in target.host.cpu.flags"), "hle"),
        (Case({}, "target.host.cpu.model != 'x'"), "cpu"),
        (Case({}, "all(gpu.brand for gpu in target.gpus)"), "gpus.brand"),
        (
            Case({"cpu.flags": ["avx"], "gpus.state": ["ok"]}, "'avx' in target.host.cpu.flags"),
            "CPU flags",
        ),
        (
            Case({"gpus.last_branch": [580]}, "all(gpu.last_branch == 580 for gpu in target.gpus)"),
            "gpus.last_branch",
        ),
        (
            Case({"gpus.data_centre": [True]}, "not any(gpu.data_centre for gpu in target.gpus)"),
            "gpus.data_centre",
        ),
    ],
    ids=str,
)
def test_what_labels_cannot_express_is_an_error_that_names_it_and_the_rule(ask, fleet, variants, case, named):
    result = ask(case, fleet, *variants)
    assert "UsageError" in result.stderr
    assert "made-up" in result.stderr.splitlines()[-1]
    assert named in result.stderr.splitlines()[-1]


def test_classes_tell_apart_what_a_rule_reads(ask, make):
    holds = "all((gpu.memory_mib or 0) > 40_000 for gpu in target.gpus)"
    hosts = {name: make.host(make.gpu(memory_mib=mib)) for name, mib in (("small", 24_000), ("big", 80_000))}
    told = json.loads(ask(Case({"gpus.memory_mib": []}, holds), hosts, make.variant(), needs=False).stdout)
    assert told["images"] == {"small": [], "big": ["t:gpu"]}
    model = Case({"cpu.model": ["x"]}, "target.host.cpu.model != 'x'")
    result = ask(model, hosts, make.variant(), needs=False)
    assert "the rule made-up reads cpu.model, which labels of nodes do not have" in result.stderr


def test_only_the_variants_to_which_a_rule_applies_are_refused(ask, fleet, make, variants):
    case = Case({"gpus.memory_mib": []}, "all(gpu.memory_mib for gpu in target.gpus)", "variant.gpu")
    cpu_only = [one for one in variants if not one.gpu]
    assert ask(case, fleet, *cpu_only).returncode == 0
    result = ask(case, fleet, *cpu_only, make.variant("t:gpu"))
    assert "t:gpu: the rule made-up compares gpus.memory_mib" in result.stderr


COMPARE = [operator.lt, operator.le, operator.eq, operator.ne, operator.ge, operator.gt]
REQUIRES = ((), (), ("arch>=8.0",), ("driver<99999999",), ("driver!=550.163.01",), ("cuda>=12.4",))


class Part(NamedTuple):
    """One comparison: of a fact with values; the verdict on a host, or on each of its GPUs."""

    fact: str
    values: tuple[Any, ...]
    holds: Any  # with a Target and a Gpu, or None

    def read(self, target, gpu):
        owner, _, name = self.fact.rpartition(".")
        if owner == "gpus":
            return getattr(gpu, name) if gpu else None
        if owner == "driver":
            return target.host.driver and getattr(target.host.driver, name)
        return bool(target.host.accelerators) if name == "accelerators" else getattr(target.host, name)


@st.composite
def ordered(draw, fact, values):
    """A comparison by numbers, or of texts; an unknown value fits, or does not."""
    value, compare, unknown = (
        draw(st.sampled_from(values)),
        draw(st.sampled_from(COMPARE)),
        draw(st.booleans()),
    )
    as_text = compare in (operator.eq, operator.ne) and draw(st.booleans())

    def holds(have):
        if have is None:
            return unknown
        return (
            compare(have, value)
            if as_text
            else compare(versions.make_sort_key(have), versions.make_sort_key(value))
        )

    return Part(fact, (value,), holds)


@st.composite
def named(draw, fact, values):
    """A comparison with names."""
    some, unknown, fits = draw(st.sets(st.sampled_from(values))), draw(st.booleans()), draw(st.booleans())
    return Part(fact, tuple(some), lambda have: unknown if have is None else (have in some) is fits)


PARTS = st.one_of(
    ordered("driver.version", [*strategies.DRIVERS, "535", "550.54.14.0", "580.65.6"]),
    named("driver.kind", ["open", "proprietary", "nouveau"]),
    ordered("gpus.compute", ["7.0", "8.0", "8.6", "8.7", "9.0"]),
    named("gpus.brand", ["nvidia", "tesla", "geforce", "unheard"]),
    named("gpus.state", ["ok", "vgpu", "lost"]),
    named("arch", ["x86_64", "aarch64"]),
    st.booleans().map(lambda fits: Part("accelerators", (), lambda have: have is fits)),
)


def rule(turns, holds, applies):
    return Rule(
        name="made-up",
        facts=tuple(turns),
        parts=(),
        fact="cuda",
        need=lambda variant: "made up" if applies(variant) else None,
        is_satisfied=holds,
        thresholds=lambda _: turns,
        reason=lambda *_, ok: ("", None, str(ok), None),
        distance=lambda *_: (1,),
    )


@st.composite
def rules(draw):
    """Return a rule of one or two comparisons, or on up to three CPU flags in any combination."""
    applies = draw(st.sampled_from([lambda _: True, lambda variant: variant.gpu]))
    if draw(st.integers(0, 3)) == 0:
        flags = draw(st.lists(st.sampled_from(["avx", "avx2", "avx512f", "sve"]), min_size=1, max_size=3))
        true = draw(st.sets(st.frozensets(st.sampled_from(flags)), min_size=1))
        return rule({"cpu.flags": flags}, lambda target, _: target.host.cpu.flags & {*flags} in true, applies)
    parts, both = draw(st.lists(PARTS, min_size=1, max_size=2)), draw(st.sampled_from([all, any]))
    turns: dict[str, list[Any]] = {}
    for part in parts:
        turns.setdefault(part.fact, []).extend(part.values)

    def holds(target, _):
        return all(
            both(part.holds(part.read(target, gpu)) for part in parts) for gpu in (target.gpus or (None,))
        )

    return rule(turns, holds, applies)


def of_its_arch(host):
    """Return a host with flags of its architecture."""
    if host.arch != "aarch64":
        return host
    return replace(host, cpu=replace(host.cpu, flags=marches.get_required_flags("neoverse-v2", "gcc-14")))


def neighbours(host):
    """Yield a host, and hosts that differ from it in one fact."""
    yield host
    if host.driver:
        for version in (*strategies.DRIVERS, "535.261", "550.54.14", "580.65.6"):
            yield replace(host, driver=replace(host.driver, version=version))
        for kind in ("open", "proprietary", "nouveau", None):
            yield replace(host, driver=replace(host.driver, kind=kind))
    for fact, values in {
        "compute": (*strategies.COMPUTES, None),
        "brand": ("nvidia", "tesla", "geforce", "quadro", None),
        "state": ("ok", "vgpu", "lost"),
    }.items():
        for value in values if host.gpus else ():
            yield replace(host, gpus=tuple(replace(gpu, **{fact: value}) for gpu in host.gpus))
    for flag in ("avx", "avx512f"):
        yield replace(host, cpu=replace(host.cpu, flags=host.cpu.flags ^ {flag}))
    yield replace(host, accelerators=() if host.accelerators else strategies.SIGNS)


def labelled_alike(host):
    """Yield a host and those with its labels, which do not tell an unknown kind of modules from others."""
    yield host
    if host.driver and host.driver.kind not in MODULE_KINDS:
        for kind in (None, "nouveau", "unheard"):
            yield replace(host, driver=replace(host.driver, kind=kind))


# They fit many hosts, so that the made-up rule decides.
LENIENT = st.sampled_from(
    [
        Variant(
            reference="t:gpu",
            digest=None,
            platform="linux/amd64",
            cuda="11.8",
            cubins=tuple(strategies.TARGETS),
            driver=UserModeDriver(mode="host"),
        ),
        Variant(reference="t:cpu", digest=None, platform="linux/amd64"),
    ]
)


@settings(max_examples=150)
@given(
    strategies.hosts.map(of_its_arch),
    LENIENT | strategies.variants,
    st.sampled_from(REQUIRES),
    rules(),
    st.booleans(),
)
def test_a_node_is_admitted_if_and_only_if_all_rules_hold(
    cluster, host, variant, requires, made_up, allow_cpu
):
    variant = replace(variant, requires=requires)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deriving, "RULES", (*RULES, made_up))
        terms = make_terms_for_our_labels(needs(variant, allow_cpu=allow_cpu))

    def holds(one):
        target = Target(host=one, gpus=one.gpus, allow_cpu=allow_cpu)
        applies = made_up.need(variant) is not None
        obeyed = not applies or made_up.is_satisfied(target, variant)
        return obeyed and all(result.ok for result in evaluate_rules(target, variant))

    for one in neighbours(host):
        fits = all(map(holds, labelled_alike(one)))
        seen = admitted(terms, cluster.own(one))
        mixed = len({(gpu.compute, gpu.brand, gpu.state) for gpu in one.gpus}) > 1
        cautious = mixed and (len(made_up.facts) > 1 or variant.requires)
        cautious = cautious or (one.driver is not None and versions.is_tegra(one.driver.version))
        assert seen == fits or (cautious and not seen), one


@pytest.mark.parametrize("unknown", [True, False])
def test_gpus_of_unknown_capability_are_admitted_as_the_rule_says(make, cluster, unknown):
    """In the label of the least capability they count as 0, below what the rule asks of others."""

    def holds(target, _):
        known = [gpu.compute for gpu in target.gpus if gpu.compute]
        return all(float(one) >= 7 for one in known) and (unknown or len(known) == len(target.gpus))

    with pytest.MonkeyPatch.context() as patch:
        made_up = rule({"gpus.compute": ["7.0"]}, holds, lambda _: True)
        patch.setattr(deriving, "RULES", (*RULES, made_up))
        terms = make_terms_for_our_labels(needs(make.cpu_variant(), allow_cpu=True))
    for computes in (
        [None],
        [None, None],
        ["6.1"],
        ["7.0"],
        ["9.0", None],
        [None, "6.1"],
        ["7.0", "6.1"],
        [],
    ):
        host = make.host(*(make.gpu(index=index, compute=one) for index, one in enumerate(computes)))
        assert admitted(terms, cluster.own(host)) == holds(Target(host=host, gpus=host.gpus), None), computes


def test_a_driver_that_no_node_can_have_gives_no_number_beyond_64_bits(make, cluster):
    for expression, fits in (
        ("driver<99999999", True),
        ("driver>=99999999", False),
        ("driver<550.99999", True),
    ):
        for variant in (make.variant(driver=make.umd("host")), make.cpu_variant()):
            terms = make_terms_for_our_labels(needs(replace(variant, requires=(expression,)), allow_cpu=True))
            bounds = [one["values"][0] for term in terms for one in term if one["operator"] in ("Gt", "Lt")]
            assert all(abs(int(bound)) < 2**63 for bound in bounds)
            assert admitted(terms, cluster.own(make.host(make.gpu()))) == fits


def test_only_linux_nodes_are_admitted(make):
    windows = make.cpu_variant(platform="windows/amd64")
    assert make_terms_for_our_labels(needs(windows, allow_cpu=True)) == ()
    unlabelled = {"kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux"}
    for listed in (False, True):
        terms = make_terms_for_our_labels(needs(make.cpu_variant(), allow_cpu=True, listed=listed))
        assert admitted(terms, unlabelled)
        assert not admitted(terms, unlabelled | {"kubernetes.io/os": "windows"})


def test_a_node_without_our_labels_is_never_taken_for_one_without_a_driver(make):
    unlabelled = {"kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux"}
    variant = make.cpu_variant(requires=("driver>=999",))
    for allow_cpu in (True, False):
        assert not admitted(make_terms_for_our_labels(needs(variant, allow_cpu=allow_cpu)), unlabelled)
    refused = make.cpu_variant(requires=("arch>=8.0",))
    assert not admitted(make_terms_for_our_labels(needs(refused, allow_cpu=True)), unlabelled)
