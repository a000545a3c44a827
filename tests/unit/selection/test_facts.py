"""Rules and the order read only declared facts, because decisions are cached by these facts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from double import Double
from hypothesis import given
from strategies import allowed, catalogs, hosts, variants

from imagematrix.common.record import Record, replace
from imagematrix.hardware.host.host import Accelerator, Cpu, Driver, Gpu, Host
from imagematrix.selection.decision import Decision
from imagematrix.selection.hardware_key import FACTS, LABEL, make_hardware_key
from imagematrix.selection.order import BY_NAME
from imagematrix.selection.query import Query
from imagematrix.selection.rules import RULES
from imagematrix.selection.selection_target import Target

OWNERS: dict[str, Any] = {"": Host, "cpu": Cpu, "driver": Driver, "gpus": Gpu}
# Other values for the facts of a host that nothing reads.
OTHERS = {
    "devices": ("/dev/nvidia9",),
    "warnings": ("something",),
    "cpu.model": "Some CPU",
    "cpu.level": "x86-64-v9",
    "cpu.usable": 9,
    "cpu.unknown_flags": frozenset({"sse9"}),
    "driver.source": "somewhere",
    "gpus.minor": 9,
    "gpus.uuid": "GPU-9",
    "gpus.pci_bus_id": "0000:99:00.0",
    "gpus.memory_shared": True,
}
# Facts that a rule reads only by way of a property, which is the fact that it declares.
COMPUTED = {"gpus.least_memory_mib": {"gpus.memory_mib", "gpus.mig"}}
UNREAD = OTHERS.keys() - FACTS - LABEL


class Recorder(Double):
    """A proxy of a record that adds the path of every field that is read to `reads`.

    A field that is a record is not a fact by itself, but its fields are.
    """

    def __init__(self, record, path, reads):
        self.record = record
        self.path = path
        self.reads = reads

    def __getattr__(self, name):
        if name not in type(self.record).__slots__:
            result = getattr(type(self.record), name)  # properties and methods read fields
            if f"{self.path}.{name}" in COMPUTED:
                self.reads.add(f"{self.path}.{name}")
                return result.fget(self.record)
            return result.fget(self) if isinstance(result, property) else partial(result, self)
        value = getattr(self.record, name)
        path = f"{self.path}.{name}" if self.path else name
        if isinstance(value, Record):
            return Recorder(value, path, self.reads)
        self.reads.add(path)
        return value


def recorded(host, *, allow_cpu=False):
    """Return a target, and a set that collects the facts read of its host."""
    reads: set[str] = set()
    gpus = tuple(Recorder(gpu, "gpus", reads) for gpu in host.gpus)
    return Target(host=Recorder(host, "", reads), gpus=gpus, allow_cpu=allow_cpu), reads


def ask(rule, target, variant):
    """Evaluate a rule except for its reason; return the verdict."""
    ok = rule.is_satisfied(target, variant)
    if not ok:
        rule.distance(target, variant)
    return ok


def undeclared(host, variant, *, allow_cpu):
    """Return the undeclared facts that are read of a host, by rule or criterion."""
    result = {}
    for rule in RULES:
        if rule.need(variant) is None:
            continue
        target, reads = recorded(host, allow_cpu=allow_cpu)
        declared = {*rule.facts, "driver"}  # a missing driver is recognized by its version
        ok = ask(rule, target, variant)
        result[rule.name] = reads - declared
        reads.clear()
        rule.reason(target, variant, ok=ok)
        result[f"{rule.name}, reason"] = reads - declared - LABEL
    for name, criterion in BY_NAME.items():
        target, reads = recorded(host)
        criterion.score(target, variant)
        result[f"order, {name}"] = reads - {*criterion.facts, "driver"}
    return {name: facts for name, facts in result.items() if facts}


@given(hosts, variants, allowed)
def test_only_declared_facts_are_read(host, variant, allow_cpu):
    assert undeclared(host, variant, allow_cpu=allow_cpu) == {}


def test_shipped_profiles_read_only_declared_facts(profiles, shipped_catalog):
    for path in profiles.values():
        for variant in shipped_catalog.variants:
            assert undeclared(Host.load(path), variant, allow_cpu=False) == {}


def test_undeclared_fact_is_detected(make):
    (fatbin,) = (rule for rule in RULES if rule.name == "fatbin")
    careless = replace(fatbin, is_satisfied=lambda target, _: target.gpus[0].memory_mib > 80_000, facts=())
    target, reads = recorded(make.host(make.gpu(memory_mib=46_068)))
    assert not ask(careless, target, make.variant(compressed_fatbin=True))
    assert reads == {"gpus.memory_mib", "driver.version"}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_declared_fact_is_read(rule, make):
    gpus = [make.gpu(), make.gpu(brand="geforce"), make.gpu(state="vgpu"), make.gpu(compute="7.0")]
    drivers = [make.umd("exact", "590.44.01"), make.umd("compat", "590.44.01", (550,)), make.umd("host")]
    some = [
        make.variant(driver=driver, compressed_fatbin=True, requires=("driver>=999",), gpu_memory_mib=16384)
        for driver in drivers
    ]
    every = set()
    for host in (make.host(), *(make.host(gpu, kind="open") for gpu in gpus)):
        for variant in (make.cpu_variant(), *some):
            target, reads = recorded(host)
            if rule.need(variant) is not None:
                rule.reason(target, variant, ok=ask(rule, target, variant))
            every |= reads
    assert every >= set(rule.facts)


def test_every_host_field_is_classified():
    fields = {
        f"{path}.{name}" if path else name for path, owner in OWNERS.items() for name in owner.__slots__
    }
    through = frozenset().union(*COMPUTED.values())
    assert fields - OWNERS.keys() == (FACTS - COMPUTED.keys()) | LABEL | UNREAD | through


def changed(host, facts):
    """Return `host` with other values for `facts`."""
    values: dict[str, dict[str, Any]] = {path: {} for path in OWNERS}
    for fact in facts:
        path, _, name = fact.rpartition(".")
        values[path][name] = OTHERS[fact]
    return replace(
        host,
        cpu=replace(host.cpu, **values["cpu"]),
        driver=host.driver and replace(host.driver, **values["driver"]),
        gpus=tuple(replace(gpu, **values["gpus"]) for gpu in host.gpus),
        **values[""],
    )


def answer(host, catalog, *, allow_cpu):
    """Return everything that a new decision about a host contains."""
    decision = Decision(Query(catalog, ()), Target(host=host, gpus=host.gpus, allow_cpu=allow_cpu))
    why = decision.ambiguity, decision.miss, decision.candidates
    return decision.variant, decision.fits, decision.differing, why


@given(hosts, catalogs, allowed)
def test_hosts_with_equal_facts_get_equal_answers(host, catalog, allow_cpu):
    twin = changed(host, UNREAD)
    one, other = (make_hardware_key(some, some.gpus, allow_cpu=allow_cpu) for some in (host, twin))
    assert one == other
    assert answer(host, catalog, allow_cpu=allow_cpu) == answer(twin, catalog, allow_cpu=allow_cpu)


def test_hosts_that_differ_in_a_fact_are_different_hardware(make):
    host = make.host(make.gpu(), kind="open")
    others = {
        "arch": replace(host, arch="other"),
        "accelerators": replace(host, accelerators=(Accelerator(kind="wsl", where="/dev/dxg"),)),
    }
    for fact in (FACTS | LABEL) - others.keys():
        path, _, name = ("gpus.memory_mib" if fact in COMPUTED else fact).rpartition(".")
        if path == "gpus":
            others[fact] = replace(host, gpus=tuple(replace(gpu, **{name: "other"}) for gpu in host.gpus))
        else:
            others[fact] = replace(host, **{path: replace(getattr(host, path), **{name: "other"})})
    keys = {make_hardware_key(one, one.gpus, allow_cpu=False) for one in (host, *others.values())}
    assert len(keys) == 1 + len(others)


def covered(path, reads, need):
    """Whether `need` read a field of a variant or returned the record that contains it."""
    return path in reads or (isinstance(need, Recorder) and path.startswith(f"{need.path}."))


@given(hosts, variants, allowed)
def test_only_fields_of_the_need_are_read_from_a_variant(host, variant, allow_cpu):
    target = Target(host=host, gpus=host.gpus, allow_cpu=allow_cpu)
    rules: list[Any] = [*RULES, *BY_NAME.values()]
    for rule in rules:
        reads: set[str] = set()
        variant_ = Recorder(variant, "", reads)
        need = rule.need(variant_)
        needed = set(reads)
        reads.clear()
        if rule in BY_NAME.values():
            rule.score(target, variant_)
        elif need is not None:
            ask(rule, target, variant_)
        assert [path for path in reads if not covered(path, needed, need)] == []


@given(hosts, variants, variants, allowed)
def test_equal_needs_have_equal_verdicts(host, variant, other, allow_cpu):
    target = Target(host=host, gpus=host.gpus, allow_cpu=allow_cpu)
    for field in variant.__slots__:
        twin = replace(variant, **{field: getattr(other, field)})
        for rule in RULES:
            if rule.need(variant) == rule.need(twin) is not None:
                assert rule.is_satisfied(target, variant) is rule.is_satisfied(target, twin)
                assert rule.measure_refusal(target, variant) == rule.measure_refusal(target, twin)
        for criterion in BY_NAME.values():
            if criterion.need(variant) == criterion.need(twin):
                assert criterion.score(target, variant) == criterion.score(target, twin)
