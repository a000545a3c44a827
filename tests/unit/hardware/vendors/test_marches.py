from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.hardware.vendors import macros, marches
from imagematrix.hardware.vendors._data import load

TABLE = load("marches.json")
LEVEL_FLAGS = sorted({flag for _, flags in marches.LEVELS for flag in flags})
FLAGS = st.frozensets(st.sampled_from([*LEVEL_FLAGS, "aes", "avx512_vnni"]))


def test_compilers_are_ordered_and_cover_both_architectures():
    assert marches.list_compilers() == (
        *(f"clang-{major}" for major in (*range(14, 20), 21, 22)),
        *(f"gcc-{major}" for major in range(11, 17)),
    )
    for compiler in marches.list_compilers():
        assert {"x86-64", "x86-64-v3", "haswell", "armv8-a", "neoverse-n1"} <= marches.list_known_names(
            compiler
        )


def test_marches_known_to_a_compiler():
    assert marches.list_known_names("gcc-17") is None
    assert "znver3" in marches.list_known_names("gcc-12")
    assert "znver4" not in marches.list_known_names("gcc-12")
    assert "neoverse-v2" not in marches.list_known_names("clang-15")
    assert "diamondrapids" in marches.list_known_names("gcc-15")
    assert "znver6" not in marches.list_known_names("gcc-15")
    assert "znver6" in marches.list_known_names("gcc-16")
    assert "native" not in marches.list_known_names("gcc-14")


@pytest.mark.parametrize(
    ("march", "compiler", "present", "absent"),
    [
        ("haswell", "gcc-12", {"avx2", "bmi2", "fma", "pclmulqdq"}, {"aes", "adx", "hle", "rtm"}),
        ("haswell", "gcc-14", {"avx2"}, {"aes"}),
        ("skylake", "gcc-14", {"aes", "adx"}, {"sgx", "xsaves"}),
        (
            "sapphirerapids",
            "gcc-12",
            {"avx512_fp16", "avx_vnni", "amx_tile", "avx512_vp2intersect"},
            {"enqcmd"},
        ),
        ("sapphirerapids", "gcc-14", {"avx512_fp16", "avx_vnni"}, {"avx512_vp2intersect", "cldemote", "pku"}),
        ("znver4", "gcc-14", {"avx512_bf16", "sha_ni", "clzero"}, {"pku", "mwaitx", "rdpid", "wbnoinvd"}),
        ("znver4", "clang-19", {"avx512_bf16"}, {"pku", "rdpru"}),
        ("goldmont", "gcc-12", {"sse4_2", "aes"}, {"avx"}),
        ("x86-64", "gcc-12", {"sse2"}, {"pni"}),
        ("neoverse-v1", "gcc-12", {"sve", "bf16", "i8mm"}, {"rng", "paca"}),
        ("neoverse-v2", "gcc-14", {"sve2", "ilrcpc", "uscat"}, {"mops"}),  # gcc writes stlur
        ("neoverse-n1", "gcc-14", {"lrcpc"}, {"ilrcpc", "uscat"}),
        ("armv8.2-a", "gcc-14", {"atomics"}, {"sve"}),
        ("armv8.8-a", "gcc-14", {"mops", "ilrcpc"}, {"cssc", "paca", "bti"}),
        ("armv9.6-a", "gcc-16", {"cmpbr", "faminmax", "lut"}, {"fprcvt"}),
        ("olympus", "clang-22", {"f8cvt", "faminmax", "sve2"}, {"cmpbr"}),
        ("diamondrapids", "gcc-15", {"apx", "avx10_2", "amx_fp8", "movrs", "avx512f"}, {"pku"}),
        ("graniterapids", "gcc-16", {"amx_fp16", "avx512_fp16"}, {"avx10_2", "apx"}),
        ("znver6", "gcc-16", {"avx512_bmm", "avx512_fp16"}, {"apx"}),
    ],
)
def test_required_flags_of_a_march(march, compiler, present, absent):
    required = marches.get_required_flags(march, compiler)
    assert present <= required
    assert not absent & required


@pytest.mark.parametrize(
    ("march", "compiler"),
    [
        ("znver4", "gcc-12"),
        ("nonsense", "gcc-12"),
        ("nonsense", "gcc-17"),
        ("haswell", "icc-19"),
        ("haswell", ""),
    ],
)
def test_unknown_march_has_no_required_flags(march, compiler):
    assert marches.get_required_flags(march, compiler) is None


@pytest.mark.parametrize("compiler", ["gcc-17", "gcc-9", "gcc"])
def test_unknown_compiler_version_requires_all_known_flags(compiler):
    versions = [marches.get_required_flags("sapphirerapids", f"gcc-{major}") for major in range(11, 17)]
    assert marches.get_required_flags("sapphirerapids", compiler) == frozenset().union(*versions)
    assert marches.get_required_flags("znver6", compiler) == marches.get_required_flags("znver6", "gcc-16")


def test_ignored_flags_are_never_required():
    for arch, ignored in marches.IGNORED.items():
        for march in TABLE[arch]:
            for compiler in marches.list_compilers():
                assert not ignored & (marches.get_required_flags(march, compiler) or frozenset())


def test_every_flag_of_the_table_has_a_macro():
    for arch, names in macros.FLAGS.items():
        flags = {flag for sets in TABLE[arch].values() for group in sets.values() for flag in group.split()}
        announced = {flag for group in names.values() for flag in group.split()}
        assert flags - announced <= ({"cmpbr", "ilrcpc", "lrcpc3", "uscat"} if arch == "aarch64" else set())
        assert marches.IGNORED[arch] <= announced


@pytest.mark.parametrize(
    ("march", "level"),
    [
        ("x86-64", "x86-64-v1"),
        ("k8", "x86-64-v1"),
        ("core2", "x86-64-v1"),
        ("nehalem", "x86-64-v2"),
        ("goldmont", "x86-64-v2"),
        ("sandybridge", "x86-64-v2"),
        ("haswell", "x86-64-v3"),
        ("znver1", "x86-64-v3"),
        ("alderlake", "x86-64-v3"),
        ("knl", "x86-64-v3"),
        ("skylake-avx512", "x86-64-v4"),
        ("x86-64-v4", "x86-64-v4"),
        ("armv9-a", None),
    ],
)
@pytest.mark.parametrize("compiler", ["gcc-14", "clang-14"])
def test_level_of_required_flags(march, compiler, level):
    assert marches.get_level(marches.get_required_flags(march, compiler)) == level


@pytest.mark.parametrize("name", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_each_level_matches_every_compiler(name):
    for compiler in marches.list_compilers():
        assert marches.get_level(marches.get_required_flags(name, compiler)) == name


def test_level_of_a_host():
    v3 = {flag for name, flags in marches.LEVELS[:3] for flag in flags}
    host = v3 | {"fpu", "vme", "syscall", "lm", "cmov", "xsave", "avx512f", "avx512vl"}
    assert marches.get_level(host) == "x86-64-v3"
    assert marches.get_level(host - {"movbe"}) == "x86-64-v2"
    assert marches.get_level(host - {"sse2"}) is None
    assert marches.get_level(frozenset({"fp", "asimd", "atomics"})) is None
    assert marches.get_level(frozenset()) is None


@given(FLAGS, FLAGS)
def test_more_flags_never_lower_the_level(some, more):
    assert marches.get_level_rank(marches.get_level(some)) <= marches.get_level_rank(
        marches.get_level(some | more)
    )


@pytest.mark.parametrize(
    ("level", "rank"),
    [
        (None, 0),
        ("", 0),
        ("armv8", 0),
        ("x86-64-v1", 1),
        ("x86-64-v2", 2),
        ("x86-64-v3", 3),
        ("x86-64-v4", 4),
    ],
)
def test_levels_are_ranked(level, rank):
    assert marches.get_level_rank(level) == rank


@pytest.mark.parametrize(
    ("march", "vendor"),
    [
        ("haswell", "intel"),
        ("x86-64-v3", None),
        ("x86-64", None),
        ("skx", "intel"),
        ("knl", "intel"),
        ("znver4", "amd"),
        ("opteron-sse3", "amd"),
        ("k8", "amd"),
        ("amdfam10", "amd"),
        ("c86-4g-m7", "amd"),
        ("diamondrapids", "intel"),
        ("nano-x4", "centaurhauls"),
        ("lujiazui", "centaurhauls"),
        ("neoverse-v2", None),
        ("armv8-a", None),
        ("nonsense", None),
    ],
)
def test_vendor_of_a_march(march, vendor):
    assert marches.get_vendor(march) == vendor


@pytest.mark.parametrize(
    ("vendor_id", "vendor"),
    [
        ("GenuineIntel", "intel"),
        ("AuthenticAMD", "amd"),
        ("HygonGenuine", "amd"),
        ("CentaurHauls", "centaurhauls"),
        ("  Shanghai  ", "shanghai"),
        ("", None),
        (None, None),
    ],
)
def test_vendor_of_a_host(vendor_id, vendor):
    assert marches.get_host_vendor(vendor_id) == vendor


@pytest.mark.parametrize(
    ("march", "arch", "option"),
    [
        ("haswell", "x86_64", "-march=haswell"),
        ("x86-64-v3", "x86_64", "-march=x86-64-v3"),
        ("armv8.2-a", "aarch64", "-march=armv8.2-a"),
        ("neoverse-v2", "aarch64", "-mcpu=neoverse-v2"),
        ("a64fx", "aarch64", "-mcpu=a64fx"),
        ("armv9.9-a", "aarch64", "-march=armv9.9-a"),
        ("neoverse-v9", "aarch64", "-mcpu=neoverse-v9"),
        ("nonsense", "x86_64", "-march=nonsense"),
    ],
)
def test_architecture_and_option_of_a_march(march, arch, option):
    assert marches.get_arch(march) == arch
    assert marches.get_option(march, arch) == option


def test_march_names_are_unique_to_an_architecture():
    assert not TABLE["x86_64"].keys() & TABLE["aarch64"].keys()


def test_flags_from_macros_exclude_ignored_flags():
    text = "#define __AVX__ 1\n#define __PKU__ 1\n"
    assert marches.get_flags_from_macros(text, "x86_64") == {"avx"}


PAUTH, SIGNED = "#define __ARM_FEATURE_PAUTH 1\n", "#define __ARM_FEATURE_PAC_DEFAULT 1\n"


@pytest.mark.parametrize(
    ("text", "march", "needed"),
    [
        (PAUTH, "armv8.3-a", False),
        (PAUTH + SIGNED, "armv8.3-a", True),
        (PAUTH + SIGNED, "armv8-a+pauth", True),
        (SIGNED, "armv8.3-a", True),  # gcc 12 writes retaa for it, and has no macro to say so
        (SIGNED, "neoverse-v1", True),
        (SIGNED, "armv8-a", False),  # by hints, which older CPUs pass over
        (SIGNED, "neoverse-n1", False),
        ("", "armv8.3-a", False),
    ],
)
def test_signed_return_addresses_require_pointer_authentication(text, march, needed):
    result = marches.get_flags_from_macros(text, "aarch64", march)
    assert (result >= marches.SIGNING) is needed
    assert marches.SIGNING.isdisjoint(result) is not needed


def test_flags_from_macros_depend_on_the_march():
    text = "#define __ARM_FEATURE_ATOMICS 1\n#define __ARM_FEATURE_PAUTH 1\n"
    assert marches.get_flags_from_macros(text, "aarch64") == {"atomics"}
    assert marches.get_flags_from_macros(text, "aarch64", "armv8.8-a") == {
        "atomics",
        "ilrcpc",
        "uscat",
        "mops",
    }
    newer = "#define __ARM_FEATURE_DOTPROD 1\n#define __ARM_FEATURE_JCVT 1\n"
    assert marches.get_flags_from_macros(newer, "aarch64", "neoverse-v2") >= {"ilrcpc", "uscat"}


@pytest.mark.parametrize("arch", marches.IGNORED)
def test_code_depends_on_the_flags_of_every_march_and_on_those_that_llvm_detects(arch):
    flags = marches.list_code_flags(arch)
    assert marches.DETECTED[arch] <= flags
    assert flags.isdisjoint(marches.IGNORED[arch])
    for march in load("marches.json")[arch]:
        assert marches.get_common_flags(march) <= flags


def test_of_an_unknown_architecture_no_flags_are_known():
    assert marches.list_code_flags("riscv64") == frozenset()
