"""Remedies in words and as changes; the properties are in test_remedy_properties.py."""

from __future__ import annotations

import pytest

from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.selection.selection import NothingFits
from imagematrix.selection.selector import explain, select

K80 = {"compute": "3.7", "name": "Tesla K80", "pci_device_id": "102d", "brand": "tesla"}
V100 = {"compute": "7.0", "name": "Tesla V100", "pci_device_id": "1db5", "brand": "tesla"}
B200 = {"compute": "10.0", "name": "NVIDIA B200"}


@pytest.fixture
def refusal(make):
    """Call it with a host and variants to get the error."""

    def ask(host, *variants, **question):
        with pytest.raises(NothingFits) as caught:
            select(host, make.catalog(*variants), **question)
        miss = caught.value.selection.miss
        assert caught.value.remedy == miss.fix
        assert miss.to_json()["change"] == miss.change
        return miss

    return ask


@pytest.fixture
def remedy(refusal):
    def ask(host, *variants, **question):
        miss = refusal(host, *variants, **question)
        return miss.fix, miss.change

    return ask


def by_host(make, **facts):
    return make.variant(**({"driver": make.umd("host")} | facts))


def test_a_chip_that_newer_drivers_dropped_gets_an_older_release(make, remedy):
    host = make.host(make.gpu(**K80), driver="470.256.02")
    assert remedy(host, by_host(make, cubins=("80",))) == (
        "build a variant for compute 3.7 with CUDA 11.8",
        {"matrix": {"compute": "3.7", "cuda": "11.8"}},
    )


def test_a_host_beyond_the_last_driver_of_its_gpu_goes_back(make, remedy):
    host = make.host(make.gpu(**V100), driver="590.44.01")
    assert remedy(host, by_host(make, cubins=("70",))) == (
        "use a driver of branch 580 or older, but not older than 525.60.13",
        {"driver": {"version": "580.65.06", "kind": None}},
    )


def test_the_message_names_every_rule_that_the_remedy_leaves(make, refusal):
    image = make.cpu_variant(cpu_flags=make.flags("x86-64-v4"))
    miss = refusal(make.host(make.gpu(), march="x86-64-v3"), image)
    assert miss.change == {"option": "--allow-cpu"}
    assert miss.fix == "pass allow_cpu=True"
    assert "would leave accelerators unused: GPU 0 (NVIDIA L40S), and the host's CPUs lack" in miss.why
    after = refusal(make.host(make.gpu(), march="x86-64-v3"), image, allow_cpu=True)
    assert [rule.rule for rule in after.rules] == ["cpu"]
    assert after.change == {"matrix": {"march": "x86-64-v3"}}


def test_a_build_ends_several_refusals(make, refusal):
    foreign = by_host(make, platform="linux/arm64", cubins=("90",), cpu_flags=frozenset({"sve2"}))
    miss = refusal(make.host(make.gpu()), foreign)
    assert miss.fix == "build a variant for linux/amd64 and compute 8.9"
    assert miss.change == {"matrix": {"platform": "linux/amd64", "compute": "8.9"}}


@pytest.mark.parametrize(
    ("facts", "kernel", "kind", "expected"),
    [
        ({"cuda": "12.4"}, "470.256.02", None, "driver 525.60.13 or newer"),
        ({"cuda": "13.0"}, "580.65.05", None, "driver 580.65.06 or newer"),
        ({"compressed_fatbin": True}, "535.261.03", None, "driver 550.54.14 or newer"),
        (
            {"requires": ("driver<560",)},
            "580.65.06",
            None,
            "use a driver of branch 550 or older, but not older than 525.60.13",
        ),
        (
            {"requires": ("driver>=535.1,driver<560.1",), "cuda": "11.8"},
            "525.60.13",
            None,
            "driver 535.1 or newer, but older than 560.1",
        ),
        ({"cuda": "14.0"}, "580.65.06", None, "build a variant with CUDA 13.0"),
    ],
)
def test_words_of_drivers(make, remedy, facts, kernel, kind, expected):
    host = make.host(make.gpu(), driver=kernel, kind=kind)
    fix, change = remedy(host, by_host(make, **facts))
    assert fix == expected
    version = change.get("driver", {}).get("version")
    assert version is None or version.partition(".")[0] in fix


def test_the_kind_of_kernel_modules_is_part_of_the_remedy(make, remedy):
    old = by_host(make, cubins=("70",))
    assert remedy(make.host(make.gpu(**V100), driver="550.163.01", kind="open"), old) == (
        "install the proprietary kernel modules",
        {"driver": {"version": "550.163.01", "kind": "proprietary"}},
    )
    new = by_host(make, cubins=("100",), cuda="12.8", ptx=[("100", "9.0")])
    fix, change = remedy(make.host(make.gpu(**B200), driver="470.256.02", kind="proprietary"), new)
    assert fix == "driver 570.0 or newer with the open kernel modules"
    assert change == {"driver": {"version": "570.0", "kind": "open"}}


@pytest.mark.parametrize(
    ("gpu", "driver", "expected"),
    [
        ({}, ("exact", "550.163.01"), ("load driver 550.163.01", "550.163.01", "open")),
        (V100, ("exact", "550.163.01"), ("load driver 550.163.01", "550.163.01", "proprietary")),
        ({}, ("host",), ("driver 525.60.13 or newer", "525.60.13", "open")),
    ],
)
def test_a_node_without_a_driver_loads_one(make, remedy, gpu, driver, expected):
    host = make.host(make.gpu(**gpu), driver=None)
    variant = make.variant(cubins=("70", "89"), driver=make.umd(*driver))
    fix, version, kind = expected
    assert remedy(host, variant) == (fix, {"driver": {"version": version, "kind": kind}})


def test_a_node_with_two_drivers_loads_the_installed_one(make, remedy):
    host = make.host(make.gpu(), driver="550.163.01")
    host = replace(host, driver=replace(host.driver, user_mode="550.144.03"))
    fix, change = remedy(host, by_host(make))
    assert fix.startswith("reboot or reload")
    assert change == {"driver": {"version": "550.144.03", "kind": None}}


def test_no_driver_for_desktops_is_suggested_to_a_tegra(make, remedy):
    host = make.host(make.gpu(compute="8.7"), driver="540.4.0")
    assert remedy(host, by_host(make, cubins=("87",))) == ("use a container made for this JetPack", None)


def test_two_changes_are_advice_and_no_change(make, remedy):
    host = make.host(make.gpu(0, **V100), make.gpu(1, compute="9.0"))
    assert remedy(host, by_host(make, cubins=("80",))) == (
        "build a variant for compute 7.0, and pass only GPU 0",
        None,
    )
    dropped = make.host(make.gpu(**K80), driver="590.44.01")
    fix, change = remedy(dropped, by_host(make, cubins=("37",), cuda="12.4"))
    assert fix == "use a driver of branch 470 or older, and a variant that it runs"
    assert change is None


def test_an_unknown_release_has_no_nearest_one(make, refusal):
    host = make.host(make.gpu(compute="9.0"), driver="450.36.06")
    facts = {"cuda": None, "facts": (("cuda", "unknown"),), "requires": ("cuda>=12.6",)}
    assert refusal(host, by_host(make, **facts)).fix
    exact = make.variant(driver=make.umd("exact", "580.95.05"), **facts)
    assert refusal(host, exact).fix


def test_a_change_must_not_make_another_variant_nearest_that_is_refused_for_more(make, remedy):
    """With only GPU 1 passed, the other variant would be the nearest, and be refused for its driver."""
    host = make.host(make.gpu(0, **K80), make.gpu(1, compute="7.5"), driver="418.39", kind="open")
    near = by_host(make, reference="t:near", cubins=("37",), cuda="10.2")
    exact = make.umd("exact", "410.129")
    other = make.variant("t:other", cubins=("75",), cuda="10.2", driver=exact)
    first = explain(host, make.catalog(near, other)).candidates[0]
    assert (first.reference, first.failing[0].fix) == ("t:near", "pass gpus='device=1'")
    fix, change = remedy(host, near, other)
    assert (fix, change) == (
        "driver 440.33 or newer",
        {"driver": {"version": "440.33", "kind": "open"}},
    )


def test_some_gpus_of_a_node_are_an_option(make):
    host = make.host(make.gpu(0), make.gpu(1, **V100), make.gpu(2))
    other = make.variant("t:other", cubins=("90",))
    (near, _) = explain(host, make.catalog(make.variant(), other)).candidates
    (rule,) = near.failing
    assert (rule.rule, rule.fix, rule.shown) == ("device-code", "pass gpus='0,2'", "pass --gpus 0,2")
    assert (rule.to_json()["fix"], rule.change) == ("pass --gpus 0,2", {"option": "--gpus 0,2"})


def test_an_existing_variant_must_not_be_refused_for_more(make):
    # The other is for a driver that does not run its CUDA release.
    wanted = make.variant("t:a", driver=make.umd("exact", "535.261.03"), cuda="12.4")
    other = make.variant("t:b", driver=make.umd("exact", "470.256.02"), cuda="12.4")
    first, *_ = explain(make.host(make.gpu(), driver="470.256.02"), make.catalog(wanted, other)).candidates
    assert first.reference == "t:b"
    fixes = {
        one.reference: [rule.fix for rule in one.failing]
        for one in explain(make.host(make.gpu(), driver="470.256.02"), make.catalog(wanted, other)).candidates
    }
    assert fixes["t:a"][0] == "use t:b, which differs only in this"


def test_a_question_is_a_remedy_too(make):
    def build(python, **facts):
        return make.cpu_variant(f"t:v1-{python}", axes=(("python", python),), **facts)

    catalog = make.catalog(build("3.9"), build("3.13", cpu_flags=frozenset({"avx512f"})))
    host = make.host(march="x86-64-v2")
    with pytest.raises(NothingFits) as caught:
        select(host, catalog, where={"python": "3.13"})
    assert caught.value.selection.miss.change == {"option": "--where python=3.9"}
    both = make.catalog(build("3.9"), build("3.13"))
    with pytest.raises(UsageError):
        select(host, both)
    assert explain(host, both).miss.change == {"option": "--where python=3.13"}
    same = make.cpu_variant("t:a")
    twins = explain(host, make.catalog(same, replace(same, reference="t:b"))).miss
    assert (twins.fix, twins.change) == ("name one of them in place of t:v1, such as t:a", None)


def test_an_empty_catalog_has_no_remedy(make, remedy):
    assert remedy(make.host()) == (None, None)


def test_a_host_without_gpus_is_not_told_to_load_a_driver(make, refusal):
    miss = refusal(make.host(driver=None), make.variant(cuda="12.4", cubins=("90",)))
    assert miss.fix == "run it on a node with a GPU, and pass one"
    assert miss.change is None
    assert not any(result.change for result in miss.rules)
