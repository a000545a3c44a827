"""Both sides of every boundary of the rule `cpu`."""

from __future__ import annotations

import pytest

from imagematrix.selection.rules.cpu import RULE
from imagematrix.selection.selection_target import Target


@pytest.mark.parametrize(
    ("march", "need", "without", "missing"),
    [
        ("sapphirerapids", "sapphirerapids", (), None),
        ("sapphirerapids", "sapphirerapids", ("avx512_fp16",), "avx512_fp16"),
        ("sapphirerapids", "icelake-server", ("avx512_fp16", "avx_vnni"), None),
        (
            "sapphirerapids",
            "sapphirerapids",
            ("sgx", "enqcmd", "tsxldtrk", "pku"),
            None,
        ),  # hidden by a hypervisor
        ("haswell", "haswell", ("aes",), None),  # compilers use no AES for haswell
        ("skylake", "skylake", ("aes",), "aes"),
        ("znver4", "znver4", ("pku",), None),
        ("znver4", "znver2", ("pku", "flush_l1d"), None),
        ("znver4", "znver4", ("avx512_bf16", "vaes"), "avx512_bf16 vaes"),
        ("znver2", "znver2", ("rdpid", "xsaves", "wbnoinvd", "mwaitx"), None),  # an old kernel's names
        ("znver4", "sapphirerapids", (), "amx_"),
        ("x86-64-v3", "x86-64-v4", (), "avx512f"),
        ("x86-64-v4", "x86-64-v3", (), None),
    ],
)
def test_required_flags_must_be_present(judge, make, march, need, without, missing):
    result = judge(
        "cpu",
        make.host(march=march, without=without),
        make.cpu_variant(march=need, cpu_flags=make.flags(need)),
    )
    assert result.ok is (missing is None)
    assert missing is None or missing in result.why
    assert (result.fix is None) is result.ok


def test_arm_ignores_optional_flags(judge, make):
    arm = {"arch": "aarch64", "vendor": None}
    grace = make.cpu_variant(platform="linux/arm64", cpu_flags=make.flags("neoverse-v2"))
    assert judge(
        "cpu", make.host(march="neoverse-v2", without=("paca", "pacg", "bti", "mte", "rng"), **arm), grace
    ).ok
    result = judge("cpu", make.host(march="neoverse-v2", without=("sve2",), **arm), grace)
    assert not result.ok
    assert result.fix == "build a variant for march armv8-a"


@pytest.mark.parametrize("signed", [True, False])
def test_arm_code_with_signed_returns_requires_pac(judge, make, signed):
    arm = {"arch": "aarch64", "vendor": None, "driver": None}
    flags = make.flags("neoverse-v2")
    variant = make.cpu_variant(platform="linux/arm64", cpu_flags=flags, signed_returns=signed)
    result = judge("cpu", make.host(march="neoverse-v2", without=("paca", "pacg"), **arm), variant)
    assert result.ok is not signed
    assert judge("cpu", make.host(march="neoverse-v2", **arm), variant).ok
    if signed:
        assert result.why == "the host's CPUs lack paca pacg, which the code needs"


def test_fix_names_the_highest_supported_level(judge, make):
    result = judge("cpu", make.host(march="haswell"), make.cpu_variant(cpu_flags=make.flags("x86-64-v4")))
    assert result.fix == "build a variant for march x86-64-v3"
    assert result.have == "all but avx512bw avx512cd avx512dq avx512f avx512vl"


def test_unknown_host_flags_satisfy_no_requirement(judge, make):
    blind = make.host(march="x86-64-v2", without=make.flags("x86-64-v2"))
    result = judge("cpu", blind, make.cpu_variant(cpu_flags=make.flags("x86-64-v2")))
    assert (result.ok, result.have) == (False, None)
    assert judge("cpu", blind, make.cpu_variant()).ok


PROBABLE = (("cpu_flags", "probable"),)


@pytest.mark.parametrize(
    ("facts", "advice"),
    [
        ({"march": None}, "adopt the image with --cpu-flags pni,sse4_1"),
        ({"march": None, "cpu_flags": frozenset({"avx2"})}, "adopt the image with --cpu-flags none"),
        ({"march": "x86-64-v2"}, "state `cpu_code: claim` at the image in matrix.yaml"),
    ],
)
def test_probable_need_refuses_and_says_how_to_overrule_it(judge, make, facts, advice):
    variant = make.cpu_variant(
        **{"cpu_flags": frozenset({"pni", "sse4_1", "avx2"}), "facts": PROBABLE, **facts}
    )
    result = judge("cpu", make.host(march="x86-64-v2"), variant)
    assert (result.ok, result.source) == (False, "probable")
    assert result.why == (
        "the host's CPUs lack avx2, which the code probably needs, because most of a program or library is "
        f"compiled for it; if it asks for the CPU before it runs that code, {advice}"
    )
    assert judge("cpu", make.host(march="x86-64-v3"), variant).ok


def test_code_that_is_partly_for_newer_cpus_is_a_warning(make):
    partial = frozenset({"avx", "avx2", "pku"})
    variant = make.cpu_variant(cpu_flags=frozenset({"pni"}), partial_flags=partial)
    host = make.host(march="sandybridge", without=("pku",))
    (warning,) = RULE.collect_warnings(Target(host=host, gpus=()), variant)
    assert warning.kind == "cpu"
    assert warning.text == (
        "the host's CPUs lack avx2, for which much of a program or library is compiled: if it "
        "does not ask for the CPU before it runs that code, it ends with SIGILL"
    )
    assert RULE.collect_warnings(Target(host=make.host(march="haswell"), gpus=()), variant) == ()
