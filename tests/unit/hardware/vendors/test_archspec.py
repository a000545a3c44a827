"""The names of microarchitectures for conda."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.hardware.host.host import Host
from imagematrix.hardware.vendors import archspec, marches
from imagematrix.hardware.vendors._data import load

ROWS = load("archspec.json")["x86_64"]
FLAGS = {row["name"]: frozenset(row["flags"].split()) for row in ROWS}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # As archspec 0.2.7 finds them.
        ("broadwell-m60", "broadwell"),
        ("skylake-v100", "skylake_avx512"),
        ("rome-a100", "zen2"),
        ("milan-a10", "zen3"),
        ("icelake-l40s", "icelake"),
        ("sapphirerapids-h100", "sapphirerapids"),
        ("genoa-h200", "zen4"),
        ("masked", "x86_64_v4"),
        ("laptop", "alderlake"),
        ("grace-hopper", "neoverse_v2"),
    ],
)
def test_saved_hosts(name, expected):
    host = Host.load(f"tests/hosts/{name}.json")
    vendor = marches.get_host_vendor(host.cpu.vendor)
    assert archspec.find_best_name(host.arch, host.cpu.flags, vendor, host.cpu.model) == expected


@pytest.mark.parametrize(
    ("march", "expected"),
    [
        ("x86-64", "x86_64"),
        ("x86-64-v2", "x86_64_v2"),
        ("x86-64-v3", "x86_64_v3"),
        ("x86-64-v4", "x86_64_v4"),
        ("haswell", "x86_64_v3"),  # compilers leave out aes, so a host for it may lack it
        ("skylake-avx512", "skylake_avx512"),
        ("icelake-server", "icelake"),
        ("sapphirerapids", "sapphirerapids"),
        ("znver2", "zen2"),
        ("znver3", "zen3"),
        ("znver4", "zen4"),
        ("znver5", "zen5"),
        ("neoverse-v2", "aarch64"),
    ],
)
def test_marches(march, expected):
    arch = marches.get_arch(march)
    assert (
        archspec.find_best_name(arch, marches.get_common_flags(march), marches.get_vendor(march)) == expected
    )


def test_flags_common_to_all_compilers_are_needed_by_each():
    for march in ("znver4", "sapphirerapids", "neoverse-n1"):
        for compiler in marches.list_compilers():
            needed = marches.get_required_flags(march, compiler)
            assert needed is None or marches.get_common_flags(march) <= needed
    assert marches.get_common_flags("unheard-of") == frozenset()


@pytest.mark.parametrize("name", FLAGS)
def test_both_sides_of_each_row(name):
    vendor = next(row["vendor"] for row in ROWS if row["name"] == name)
    assert archspec.find_best_name("x86_64", FLAGS[name], vendor) == name
    for flag in FLAGS[name]:
        assert archspec.find_best_name("x86_64", FLAGS[name] - {flag}, vendor) != name


def test_a_name_needs_the_vendor_s_cpu():
    assert archspec.find_best_name("x86_64", FLAGS["zen4"], "amd") == "zen4"
    assert archspec.find_best_name("x86_64", FLAGS["zen4"], "intel") != "zen4"
    assert archspec.find_best_name("x86_64", FLAGS["zen4"]) == "x86_64_v4"


def test_among_arm_cores_with_the_same_flags_the_core_decides():
    flags = frozenset(" ".join(row["flags"] for row in load("archspec.json")["aarch64"]).split())
    assert archspec.find_best_name("aarch64", flags, "arm", "Neoverse-N2") == "neoverse_n2"
    assert archspec.find_best_name("aarch64", flags, "arm", "Neoverse-V2") == "neoverse_v2"
    assert archspec.find_best_name("aarch64", flags, "arm", "Cortex-X9") == "neoverse_v3ae"
    assert archspec.find_best_name("aarch64", frozenset(), "arm") == "aarch64"


def test_other_architectures_have_no_name():
    assert archspec.find_best_name("riscv64", frozenset()) is None


@given(
    st.frozensets(st.sampled_from(sorted(frozenset().union(*FLAGS.values())))),
    st.sampled_from(["amd", "intel", None]),
)
def test_a_cpu_has_all_flags_of_its_name_and_a_generic_name_if_no_other(flags, vendor):
    name = archspec.find_best_name("x86_64", flags, vendor)
    (row,) = [row for row in ROWS if row["name"] == name]
    assert FLAGS[name] <= flags
    assert row["vendor"] in (None, vendor)
