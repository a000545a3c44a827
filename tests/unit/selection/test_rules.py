"""Properties of several or all rules."""

from __future__ import annotations

from importlib import import_module

import pytest

from imagematrix.selection.candidate import evaluate_rules
from imagematrix.selection.rules import RULES
from imagematrix.selection.selection_target import Target

DRIVER = ("driver-exact", "driver-compat", "driver-gpu", "driver-cuda")
CONTRACT = ("platform", *DRIVER, "device-code", "fatbin", "cpu")


def test_rules_of_the_contract_are_in_order():
    names = [rule.name for rule in RULES]
    assert [name for name in names if name in CONTRACT] == [*CONTRACT]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_module_has_the_rule_s_name_and_documents_it(rule):
    module = import_module(f"imagematrix.selection.rules.{rule.name.replace('-', '_')}")
    assert module.RULE is rule
    holds, _, otherwise = " ".join(module.__doc__.split()).partition(". ")
    assert holds.startswith(f"`{rule.name}`: ")
    assert otherwise


MODES = {"exact": "550.163.01", "compat": "560.35.05", "host": None}


def test_virtual_gpu_requires_the_host_driver(judge, make):
    host = make.host(make.gpu(), make.gpu(1, name="NVIDIA L40S-24Q", state="vgpu"))
    variants = {mode: make.variant(driver=make.umd(mode, version)) for mode, version in MODES.items()}
    assert judge("device-code", host, variants["host"]).ok
    for mode in ("exact", "compat"):
        rule = f"driver-{mode}"
        assert judge(rule, host, variants[mode], gpus=host.gpus[:1]).ok
        result = judge(rule, host, variants[mode])
        assert not result.ok
        assert result.why.startswith("GPU 1 (NVIDIA L40S-24Q): a virtual GPU needs the driver")
        assert result.fix == "pass gpus='device=0'"
        alone = judge(rule, host, variants[mode], gpus=host.gpus[1:])
        assert alone.fix == "build a variant with no driver of its own (driver: host)"


TEGRA = ["35.4.1", "36.4.3", "540.4.0", "580.00"]


@pytest.mark.parametrize("driver", TEGRA)
def test_tegra_driver_versions_are_not_comparable(judge, make, driver):
    host = make.host(make.gpu(compute="8.7"), driver=driver)
    for mode in ("exact", "host"):
        result = judge("driver-cuda", host, make.variant(cuda="11.8", driver=make.umd(mode, driver)))
        assert not result.ok
        assert "JetPack" in result.why
        assert result.fix
    compat = make.umd("compat", "590.44.01", branches=(35, 36, 540, 580))
    assert not judge("driver-compat", host, make.variant(driver=compat)).ok
    packed = make.variant(compressed_fatbin=True, driver=make.umd("host"))
    assert not judge("fatbin", host, packed).ok


def test_inapplicable_rules_return_no_result(judge, make):
    host = make.host(make.gpu())
    of_cpu = {name for name in CONTRACT if judge(name, host, make.cpu_variant())}
    assert of_cpu == {"platform", "device-code", "cpu"}
    of_gpu = {name for name in CONTRACT if judge(name, host, make.variant(driver=make.umd("host")))}
    assert of_gpu == {"platform", "driver-gpu", "driver-cuda", "device-code", "cpu"}


def test_every_reason_is_one_line(make):
    target = Target(
        host=make.host(make.gpu(compute="7.0", brand=None), driver="470.256.02"),
        gpus=(make.gpu(compute="7.0", brand=None),),
    )
    for driver in (make.umd("exact", "550.163.01"), make.umd("compat", "550.163.01"), make.umd("host")):
        ptx = [("89", "8.4")]
        for result in evaluate_rules(
            target, make.variant(driver=driver, ptx=ptx, compressed_fatbin=True, cpu_flags=frozenset("z"))
        ):
            assert "\n" not in result.why
            assert result.why
            assert result.why[-1] not in ".;:"
            assert result.to_json()["rule"] == result.rule


def test_result_names_the_source_of_the_need(judge, make):
    host = make.host(make.gpu())
    variant = make.variant(facts=(("cubins", "bytes"), ("driver", "bytes")))
    assert judge("device-code", host, variant).source == "bytes"
    assert judge("driver-exact", host, variant).source == "bytes"
    assert judge("driver-cuda", host, variant).source == "claim"


UNDECIDED = ("cubins", "cuda", "cpu_flags")


def undecided(make):
    facts = tuple((fact, "unknown") for fact in sorted(UNDECIDED))
    return make.variant(cuda=None, cubins=(), cpu_flags=frozenset(), driver=make.umd("host"), facts=facts)


def test_unknown_image_facts_rule_out_no_host(judge, make):
    host = make.host(make.gpu())
    for rule in ("driver-cuda", "device-code", "cpu", "fatbin"):
        result = judge(rule, host, undecided(make))
        assert (result.ok, result.source) == (True, "unknown")
        assert "unknown needs rule out no host" in result.why


def test_unknown_device_code_still_requires_working_gpus(judge, make):
    variant = undecided(make)
    assert not judge("device-code", make.host(), variant).ok
    host = make.host(make.gpu(), make.gpu(1, state="lost"))
    result = judge("device-code", host, variant)
    assert not result.ok
    assert result.why == "GPU 1 (NVIDIA L40S) has fallen off the bus"
    assert result.fix == "pass gpus='device=0'"
    alone = judge("device-code", host, variant, gpus=host.gpus[1:])
    assert (alone.fix, alone.change) == ("see the warnings of `imagematrix probe`", None)
