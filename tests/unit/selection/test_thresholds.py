"""What rules state that they compare is all that their verdicts depend on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import COMPUTES, DRIVERS, FLAGS, SIGNS, allowed, hosts, mig_devices, variants

from imagematrix.common.record import replace
from imagematrix.hardware.host.host import Driver
from imagematrix.hardware.vendors import versions
from imagematrix.selection.rules import RULES
from imagematrix.selection.selection_target import Target

REQUIRES = (
    (),
    (),
    ("cuda>=12.4 brand=tesla,driver>=535,driver<536",),
    ("driver!=550.163.01", "arch>=8.0"),
    ("driver>550.54. brand!=geforce arch<=7.5.1",),
    ("cuda<12.1",),
)
ORDERED = {"driver.version", "gpus.compute", "gpus.last_branch", "gpus.least_memory_mib"}
FURTHER = ["384.81", "390.46", "470.57.02", "471.0", "535.261", "535.261.3", "550.54.14", "590.1.1"]
OTHERS: dict[str, Any] = {
    "arch": st.sampled_from(["x86_64", "aarch64", "riscv64"]),
    "flag": st.sampled_from([*sorted(frozenset().union(*FLAGS.values())), "hle", "new"]),
    "version": st.sampled_from([*DRIVERS, *FURTHER]),
    "user_mode": st.sampled_from([None, *DRIVERS]),
    "kind": st.sampled_from([None, "open", "proprietary", "other"]),
    "compute": st.sampled_from(
        [*COMPUTES, "3.7", "6.1", "7.5", "7.6", "8.1", "9.1", "11.0", "12.1", "99.9", None]
    ),
    "brand": st.sampled_from(["nvidia", "tesla", "geforce", "titan", None]),
    "name": st.sampled_from(["NVIDIA L40S", "GeForce", "Tesla", None]),
    "pci_device_id": st.sampled_from(["26b9", "1db5", "1b06", "102d", None]),
    "state": st.sampled_from(["ok", "vgpu", "lost", "failed"]),
    "memory_mib": st.one_of(st.integers(1, 9), st.sampled_from([6999, 7001, 15360, 40447, 99_999_999])),
    "mig": mig_devices,
}


def place(fact, value, stated):
    """Return where a value lies among the stated ones; all values in one place have the same verdict."""
    if value is None or value in stated:
        return value
    if fact not in ORDERED:
        return ...
    order = versions.make_sort_key(str(value)), versions.is_tegra(str(value))
    return [
        (order[0] > (one := versions.make_sort_key(str(bound).rstrip("."))), order[0] == one)
        for bound in stated
    ]


def values(host, fact):
    """Return the values of a fact: one, or one for each GPU."""
    owner, _, name = fact.rpartition(".")
    if owner == "gpus":
        return [getattr(gpu, name) for gpu in host.gpus]
    if owner == "driver":
        return [host.driver and getattr(host.driver, name)]
    return [getattr(host, name)]


def places(host, stated):
    """Return everything that a verdict may depend on according to what its rule states."""
    result: list[Any] = [len(host.gpus), host.driver is None]
    for fact, some in stated.items():
        listed = list(some)
        if fact == "cpu.flags":
            result.append(host.cpu.flags & {*listed})
        elif fact == "accelerators":
            result.append(bool(host.accelerators))
        else:
            result += [place(fact, value, listed) for value in values(host, fact)]
    tegra = host.driver is not None and versions.is_tegra(host.driver.version)
    return [*result, tegra if "driver.version" in stated else None]


@st.composite
def changes(draw, host):
    """Return a host that differs in one fact."""
    fact = draw(st.sampled_from([*OTHERS, "signs", "driver"]))
    if fact == "arch":
        return replace(host, arch=draw(OTHERS[fact]))
    if fact == "flag":
        return replace(host, cpu=replace(host.cpu, flags=host.cpu.flags ^ {draw(OTHERS[fact])}))
    if fact == "signs":
        return replace(host, accelerators=draw(st.sampled_from([(), SIGNS, (*SIGNS, *SIGNS)])))
    if fact == "driver":
        return replace(
            host, driver=draw(st.sampled_from([None, Driver(version="1.0", kind=None, source="")]))
        )
    if fact in {"version", "kind", "user_mode"}:
        return replace(host, driver=host.driver and replace(host.driver, **{fact: draw(OTHERS[fact])}))
    gpus = [replace(gpu, **{fact: draw(OTHERS[fact])}) for gpu in host.gpus]
    return replace(host, gpus=tuple(gpus))


@settings(max_examples=1000)
@given(st.data(), hosts, variants, st.sampled_from(REQUIRES), allowed)
def test_hosts_that_a_rule_does_not_tell_apart_get_the_same_verdict(data, host, variant, requires, allow_cpu):
    some = replace(variant, requires=requires)
    twin = data.draw(changes(host))
    for rule in RULES:
        if rule.need(some) is None:
            continue
        stated = {fact: [*values] for fact, values in rule.thresholds(some).items()}
        if places(host, stated) == places(twin, stated):
            verdicts = {
                rule.is_satisfied(Target(host=one, gpus=one.gpus, allow_cpu=allow_cpu), some)
                for one in (host, twin)
            }
            assert len(verdicts) == 1, rule.name


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_only_facts_that_a_rule_reads_are_stated(rule, make):
    some = [
        make.variant(
            driver=make.umd(mode, "550.163.01", branches),
            compressed_fatbin=True,
            requires=("cuda>1",),
            gpu_memory_mib=16384,
        )
        for mode, branches in (("exact", ()), ("compat", (535,)), ("host", ()))
    ]
    stated = {
        fact
        for variant in (*some, make.cpu_variant())
        if rule.need(variant) is not None
        for fact in rule.thresholds(variant)
    }
    computed = {
        "gpus.last_branch": {"gpus.pci_device_id", "gpus.compute"},
        "gpus.data_centre": {"gpus.brand", "gpus.name"},
        "driver.user_mode_differs": {"driver.version", "driver.user_mode"},
    }
    assert {one for fact in stated for one in computed.get(fact, {fact})} <= {*rule.facts}
