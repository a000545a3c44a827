"""Warnings about images: code for another march than labels name, a runtime for newer drivers."""

import re
from pathlib import Path

import pytest
from compiling import assembled, choosing, compiled

from imagematrix.audit.catalog import make_unlabelled_entry
from imagematrix.audit.contradictions import describe_contradictions
from imagematrix.audit.proven_facts import find_proven_facts, with_flags, with_signing
from imagematrix.audit.warnings import (
    warn_of_march,
    warn_of_nvml,
    warn_of_requirements,
    warn_of_runtime,
    warn_of_unlabelled,
)
from imagematrix.common.record import replace
from imagematrix.hardware.vendors import marches
from imagematrix.images.catalog.catalog import Ptx, UserModeDriver, Variant
from imagematrix.selection.rules.cpu import get_needed_flags

STARTER = Path(__file__).parents[3] / "templates/cpu/hello.c"
SUM = "for (int i = 0; i < 64; i++) a[i] = a[i] * 3.5 + i; return a[3];"
PROGRAM = f"double a[64]; int main(int n, char **v) {{ a[n] = n; {SUM} }}"
WIDE = '__attribute__((target("avx512f,prefer-vector-width=512")))'
UNCALLED = f"{WIDE} static double more(double *a) {{ {SUM} }} double (*kept)(double *) = more;"
HASWELL = Variant(
    reference="t:x",
    digest=None,
    platform="linux/amd64",
    march="haswell",
    cpu_flags=marches.get_required_flags("haswell", "gcc-14"),
)


@pytest.fixture
def program(tmp_path):
    """Call it with C and options of gcc to get a program's bytes."""
    return lambda source, *options: compiled(tmp_path / "tool", source, "-O3", *options).read_bytes()


def test_effective_march_is_accepted(audited, program):
    report = audited(("opt/tool", program(PROGRAM, "-march=haswell")))
    assert (describe_contradictions(report, HASWELL), warn_of_march(report, HASWELL)) == ("", [])
    assert report.is_decided


def test_march_without_effect_is_doubted(audited, program):
    report = audited(("opt/tool", program(PROGRAM)))
    assert describe_contradictions(report, HASWELL) == ""
    assert warn_of_march(report, HASWELL) == [
        (
            "-march=haswell shows no effect: nothing in /opt/tool is beyond the baseline; "
            "pass {{ cflags }} of the template to the compiler"
        )
    ]


@pytest.mark.parametrize("march", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_the_program_of_the_starter_uses_its_march(audited, program, march):
    variant = replace(HASWELL, march=march, cpu_flags=marches.get_required_flags(march, "gcc-14"))
    hello = program(STARTER.read_text(), f"-march={march}", "-O2", f'-DMARCH="{march}"')
    assert warn_of_march(audited(("usr/local/bin/hello", hello)), variant) == []


def test_isa_note_counts_as_an_effect(audited, program):
    noted = program("int main(void) { return 0; }", "-Wl,-z,x86-64-v3")
    assert warn_of_march(audited(("opt/tool", noted)), HASWELL) == []


@pytest.mark.parametrize("members", [(), (("opt/tool", b"#!/bin/sh\n"),)])
def test_images_without_programs_are_not_doubted(audited, members):
    assert warn_of_march(audited(*members), HASWELL) == []


@pytest.mark.parametrize("changes", [{"march": None}, {"march": "x86-64", "cpu_flags": frozenset({"sse2"})}])
def test_baseline_march_is_not_doubted(audited, program, changes):
    variant = Variant(reference="t:x", digest=None, platform="linux/amd64", **changes)
    assert warn_of_march(audited(("opt/tool", program(PROGRAM))), variant) == []


def test_required_code_beyond_the_march_contradicts(audited, program):
    report = audited(("opt/tool", program(PROGRAM, "-march=x86-64-v4", "-mprefer-vector-width=512")))
    text = describe_contradictions(report, HASWELL)
    assert re.fullmatch(r"the labels promise code for x86-64-v3, but /opt/tool needs avx512.*", text)


ARM_V8 = Variant(reference="t:x", digest=None, platform="linux/arm64", march="armv8-a")
SVE2, RET, RETAA = 0x45C30041, 0xD65F03C0, 0xD65F0BFF  # saddlb z1.d, z2.s, z3.s


def test_required_code_beyond_a_march_without_flags_contradicts(audited, tmp_path):
    tool = assembled(tmp_path / "it.so", exported=(SVE2, RET)).read_bytes()
    text = describe_contradictions(audited(("opt/it.so", tool)), ARM_V8)
    assert text == "the labels promise code for armv8-a, but /opt/it.so needs sve2"
    report = audited(("opt/it.so", assembled(tmp_path / "it.so", exported=(RET,)).read_bytes()))
    assert (describe_contradictions(report, ARM_V8), warn_of_march(report, ARM_V8)) == ("", [])


def test_code_that_signs_is_for_cpus_that_can(audited, tmp_path):
    """Its labels may have the flags, but do not count for an entry that does not sign."""
    signing = assembled(tmp_path / "it.so", exported=(0xDAC10020, RETAA)).read_bytes()
    report = audited(("opt/it.so", signing))
    for flags in (frozenset[str](), frozenset({"paca", "pacg"})):
        text = describe_contradictions(report, replace(ARM_V8, cpu_flags=flags))
        assert text == "the labels promise code for armv8-a, but /opt/it.so needs paca"
    entry = with_signing(report, ARM_V8)
    assert entry.signed_returns
    assert describe_contradictions(report, entry) == ""
    assert get_needed_flags(entry) == {"paca", "pacg"}
    adopted, _ = make_unlabelled_entry(report)
    assert get_needed_flags(adopted) == {"paca", "pacg"}


def test_signing_by_hints_needs_nothing(audited, tmp_path):
    hints = assembled(tmp_path / "it.so", exported=(0xD503233F, 0xD50323BF, RET)).read_bytes()
    report = audited(("opt/it.so", hints))
    assert not with_signing(report, ARM_V8).signed_returns
    assert describe_contradictions(report, ARM_V8) == ""


def test_undispatched_code_beyond_a_march_without_flags_is_doubted(audited, tmp_path):
    tool = assembled(tmp_path / "tool", exported=(RET,), hidden=(SVE2, RET)).read_bytes()
    report = audited(("opt/it.so", tool))
    assert describe_contradictions(report, ARM_V8) == ""
    (doubt,) = warn_of_march(report, ARM_V8)
    assert doubt.startswith("/opt/it.so has code beyond -march=armv8-a in hidden: sve2; ")


def test_undispatched_code_beyond_the_march_is_doubted(audited, program):
    report = audited(("opt/tool", program(PROGRAM + UNCALLED, "-march=haswell")))
    assert describe_contradictions(report, HASWELL) == ""
    (doubt,) = warn_of_march(report, HASWELL)
    assert doubt == (
        "/opt/tool has code beyond -march=haswell in more: avx512f; "
        "nothing shows that it checks the CPU before using it"
    )
    assert not report.is_decided


def test_dispatched_code_is_not_doubted(audited, program):
    chosen = UNCALLED.replace("more", "more_avx512f")
    assert warn_of_march(audited(("opt/tool", program(PROGRAM + chosen, "-march=haswell"))), HASWELL) == []
    asking = 'int asks(void) { return __builtin_cpu_supports("avx512f"); }'
    raw = program(PROGRAM + UNCALLED + asking, "-march=haswell")
    assert warn_of_march(audited(("opt/tool", raw)), HASWELL) == []


def test_dispatched_code_does_not_count_as_an_effect(audited, program):
    chosen = UNCALLED.replace("more", "more_avx512f")
    assert "shows no effect" in warn_of_march(audited(("opt/tool", program(PROGRAM + chosen))), HASWELL)[0]


SHARED = ("-shared", "-fPIC")
V2 = replace(HASWELL, march="x86-64-v2", cpu_flags=marches.get_required_flags("x86-64-v2", "gcc-14"))
CLAIMED = (("cpu_flags", "claim"),)


def test_code_mostly_beyond_the_march_is_doubted_and_needed(audited, program):
    report = audited(("opt/it.so", program(choosing(40, 1), *SHARED)))
    assert describe_contradictions(report, V2) == ""
    (doubt,) = warn_of_march(report, V2)
    assert doubt == (
        "most of /opt/it.so is compiled for CPUs with avx avx2 fma, beyond -march=x86-64-v2, so the image "
        "counts as one that needs them; if it asks for the CPU before it runs that code, state "
        "`cpu_code: claim` at the image in matrix.yaml"
    )
    entry = with_flags(report, V2)
    assert entry.cpu_flags == V2.cpu_flags | {"avx", "avx2", "fma"}
    assert ("cpu_flags", "probable") in find_proven_facts(report, entry)
    assert warn_of_march(report, entry) == []
    assert with_flags(report, entry) == entry
    assert with_flags(report, HASWELL) == HASWELL


def test_code_mostly_beyond_the_march_may_be_claimed_not_to_matter(audited, program):
    report = audited(("opt/it.so", program(choosing(40, 1), *SHARED)))
    claimed = replace(V2, facts=CLAIMED)
    assert warn_of_march(report, claimed) == []
    assert with_flags(report, claimed) == claimed
    assert ("cpu_flags", "claim") in find_proven_facts(report, claimed)


def test_code_partly_beyond_the_march_is_kept_for_warnings(audited, program):
    report = audited(("opt/it.so", program(choosing(30, 20), *SHARED)))
    assert warn_of_march(report, V2) == []
    entry = with_flags(report, V2)
    assert (entry.cpu_flags, entry.partial_flags) == (V2.cpu_flags, {"avx", "avx2", "fma"})
    assert "cpu_flags" not in dict(find_proven_facts(report, entry))
    cell = replace(V2, march=None)
    assert with_flags(report, cell) == cell


def test_unlabelled_image_is_doubted_for_its_cpu_flags(audited, program):
    most, more = program(choosing(40, 1), *SHARED), program(choosing(30, 20), *SHARED)
    (doubt,) = warn_of_unlabelled(audited(("opt/most.so", most), ("opt/more.so", more)))
    assert doubt == (
        "most of /opt/most.so is compiled for CPUs with avx avx2 fma, so the image counts as one that needs "
        "them; if it asks for the CPU before it runs that code, adopt the image with --cpu-flags none"
    )
    (doubt,) = warn_of_unlabelled(audited(("opt/more.so", more)))
    assert doubt == (
        "much of /opt/more.so is compiled for CPUs with avx avx2 fma, but the image counts as one "
        "that runs without them: nothing proves that it asks for the CPU before it runs that code"
    )


def test_of_alternatives_by_cpu_nothing_is_needed(audited, program):
    """Neither by instructions nor by a note of the linker."""
    noted = program("int it(void) { return 0; }", *SHARED, "-Wl,-z,x86-64-v3")
    newer, plain = program(PROGRAM, "-march=haswell"), program(PROGRAM)
    report = audited(
        ("opt/avx2/it", newer), ("opt/plain/it", plain), ("opt/it-avx2.so", noted), ("opt/it.so", plain)
    )
    assert report.flags == {}
    assert report.is_decided
    report = audited(("opt/avx2/it", newer), ("opt/it-avx2.so", noted))
    assert report.flags["fma"] == "/opt/avx2/it"


def test_long_lists_are_shortened(audited, program):
    raw = program(PROGRAM)
    (text,) = warn_of_march(audited(*((f"opt/{name}", raw) for name in "abcde")), HASWELL)
    assert "/opt/a, /opt/b, /opt/c and 2 more" in text


EXACT = UserModeDriver(mode="exact", version="550.163.01")
NEWER = UserModeDriver(mode="exact", version="580.65.06")


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    """Call it with a version to get a library that is CUDA's runtime by its names."""
    folder = tmp_path_factory.mktemp("runtime")

    def call(version):
        soname = f"-Wl,-soname,libcudart.so.{version.partition('.')[0]}"
        library = compiled(folder / "it", "int it(void) { return 1; }", "-shared", "-fPIC", soname)
        return f"usr/lib/libcudart.so.{version}", library.read_bytes()

    return call


@pytest.fixture
def warned(audited, runtime):
    """Call it with facts of a variant and versions of runtimes to get the warnings."""

    def call(*versions, **facts):
        variant = Variant(reference="t:v1-a", digest=None, platform="linux/amd64", **facts)
        return list(warn_of_runtime(audited(*map(runtime, versions)), variant))

    return call


def test_a_runtime_of_a_newer_major_needs_newer_drivers(warned):
    (text,) = warned("13.0.48", cuda="12.4")
    assert text == (
        "/usr/lib/libcudart.so.13.0.48 is the runtime of CUDA 13.0.48, "
        "which needs driver 580.65.06 or newer, and CUDA 12.4 admits driver 525.60.13"
    )


def test_the_driver_of_the_image_counts(warned):
    (text,) = warned("13.0.48", cuda="12.4", driver=EXACT)
    assert text.endswith("needs driver 580.65.06 or newer, and the image has driver 550.163.01")


@pytest.mark.parametrize(
    ("versions", "facts"),
    [
        (["12.9.37"], {"cuda": "12.4"}),  # minor versions are compatible
        (["11.8.89"], {"cuda": "12.4"}),
        (["13.0.48"], {"cuda": "13.0"}),
        (["13.0.48"], {"cuda": "12.4", "driver": NEWER}),
        (["13.0.48"], {}),  # for CPUs
        (["99.0.1"], {"cuda": "12.4"}),  # in no table
        ([], {"cuda": "12.4"}),
    ],
)
def test_runtimes_that_the_drivers_run_give_no_warnings(warned, versions, facts):
    assert warned(*versions, **facts) == []


@pytest.mark.parametrize(
    ("mode", "versions", "expected"),
    [
        ("compat", {"nccl": "2.27.3", "torch": "2.8.0"}, ["NCCL 2.27.3 ends with an error"]),
        ("compat", {"nccl": None}, ["NCCL ends with an error"]),
        ("compat", {"torch": "2.8.0"}, []),
        ("exact", {"nccl": "2.27.3"}, []),
        (None, {"nccl": "2.27.3"}, []),
    ],
)
def test_nccl_needs_nvml_which_cuda_compat_lacks(mode, versions, expected):
    driver = UserModeDriver(mode=mode, version="575.57.08") if mode else None
    found = [text.partition(" where ")[0] for text in warn_of_nvml(driver, versions.items())]
    assert found == expected


HOST = UserModeDriver(mode="host")
OLD_BRANCH = "brand=tesla,driver>=535,driver<536"


@pytest.mark.parametrize(
    ("value", "facts", "asked", "oldest"),
    [
        (f"cuda>=12.8 {OLD_BRANCH}", {"cuda": "12.8", "cubins": ("90",)}, "570.26", "525.60.13"),
        ("cuda>=13.0", {"cuda": "12.4", "compressed_fatbin": True}, "580.65.06", "550.54.14"),
        ("cuda>=12.8", {"cuda": "12.4", "ptx": (Ptx(target="80", isa="8.4"),)}, "570.26", "550.54.14"),
        ("driver>=550.1", {"cuda": "12.4", "cubins": ("90",)}, "550.1", "525.60.13"),
    ],
)
def test_a_requirement_that_asks_for_more_than_the_code(audited, value, facts, asked, oldest):
    report = audited(("etc/x", b""), env=[f"NVIDIA_REQUIRE_CUDA={value}"])
    variant = Variant(reference="t:x", digest=None, platform="linux/amd64", driver=HOST, **facts)
    (text,) = warn_of_requirements(report, variant)
    assert text.startswith(f"NVIDIA_REQUIRE_CUDA asks for driver {asked} or newer")
    assert f"runs from driver {oldest} on" in text
    assert f'state ENV NVIDIA_REQUIRE_CUDA="driver>={oldest}" in the Dockerfile' in text


@pytest.mark.parametrize(
    ("environment", "facts"),
    [
        ({"NVIDIA_REQUIRE_CUDA": "cuda>=12.0"}, {"cuda": "12.4", "driver": HOST}),
        ({"NVIDIA_REQUIRE_CUDA": OLD_BRANCH}, {"cuda": "12.4", "driver": HOST}),
        ({"NVIDIA_REQUIRE_CUDA": "cuda>=13.0"}, {"cuda": "12.4", "driver": EXACT}),
        ({"NVIDIA_REQUIRE_CUDA": "cuda>=13.0", "NVIDIA_DISABLE_REQUIRE": "true"}, {"cuda": "12.4"}),
        ({"NVIDIA_REQUIRE_JETPACK": "cuda>=13.0"}, {"cuda": "12.4"}),
        ({"NVIDIA_REQUIRE_CUDA": "nonsense"}, {"cuda": "12.4"}),
        ({"NVIDIA_REQUIRE_CUDA": "cuda>=13.0"}, {}),
        ({"NVIDIA_REQUIRE_CUDA": "cuda>=13.0"}, {"cuda": "13.0", "facts": (("cuda", "claim"),)}),
        ({}, {"cuda": "12.4"}),
    ],
)
def test_a_requirement_that_asks_for_no_more_than_the_code(audited, environment, facts):
    report = audited(("etc/x", b""), env=[f"{name}={value}" for name, value in environment.items()])
    variant = Variant(reference="t:x", digest=None, platform="linux/amd64", cubins=("90",), **facts)
    assert list(warn_of_requirements(report, variant)) == []
