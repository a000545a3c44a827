"""Test the rule `cpu` on real code: what it accepts never dies of SIGILL.

A program is compiled for every march that the local gcc knows, and runs on CPUs simulated by QEMU and on this
machine. The features of a CPU are read from its CPUID leaves, as the kernel does for /proc/cpuinfo.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
from emulating import accepted, compiled_marches, compiler_name, killed

import imagematrix as im

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
MODELS = (
    *("qemu64", "Nehalem", "Westmere", "SandyBridge", "IvyBridge", "Haswell", "Broadwell", "Skylake-Client"),
    *("Opteron_G3", "Opteron_G4", "EPYC", "EPYC-Rome", "EPYC-Milan", "Haswell-noTSX", "max"),
    *("Haswell,-fma", "Haswell,-avx2", "Skylake-Client,-aes", "EPYC-Milan,-bmi2"),
)
# Bits of CPUID by leaf, subleaf and register, under the names that /proc/cpuinfo has
# (arch/x86/include/asm/cpufeatures.h of Linux).
BITS = {
    ("1", "0", "edx"): {4: "tsc", 8: "cx8", 15: "cmov", 23: "mmx", 24: "fxsr", 25: "sse", 26: "sse2"},
    ("1", "0", "ecx"): {
        0: "pni",
        1: "pclmulqdq",
        9: "ssse3",
        12: "fma",
        13: "cx16",
        19: "sse4_1",
        20: "sse4_2",
        22: "movbe",
        23: "popcnt",
        25: "aes",
        26: "xsave",
        28: "avx",
        29: "f16c",
        30: "rdrand",
    },
    ("7", "0", "ebx"): {
        0: "fsgsbase",
        3: "bmi1",
        5: "avx2",
        8: "bmi2",
        16: "avx512f",
        17: "avx512dq",
        18: "rdseed",
        19: "adx",
        21: "avx512ifma",
        23: "clflushopt",
        24: "clwb",
        28: "avx512cd",
        29: "sha_ni",
        30: "avx512bw",
        31: "avx512vl",
    },
    ("7", "0", "ecx"): {
        1: "avx512vbmi",
        5: "waitpkg",
        6: "avx512_vbmi2",
        8: "gfni",
        9: "vaes",
        10: "vpclmulqdq",
        11: "avx512_vnni",
        12: "avx512_bitalg",
        14: "avx512_vpopcntdq",
        27: "movdiri",
        28: "movdir64b",
    },
    ("7", "0", "edx"): {
        8: "avx512_vp2intersect",
        14: "serialize",
        22: "amx_bf16",
        23: "avx512_fp16",
        24: "amx_tile",
        25: "amx_int8",
    },
    ("7", "1", "eax"): {4: "avx_vnni", 5: "avx512_bf16"},
    ("d", "1", "eax"): {0: "xsaveopt", 1: "xsavec"},
    ("80000001", "0", "ecx"): {0: "lahf_lm", 5: "abm", 6: "sse4a", 11: "xop", 16: "fma4", 21: "tbm"},
    ("80000001", "0", "edx"): {30: "3dnowext", 31: "3dnow"},
    ("80000008", "0", "ebx"): {0: "clzero"},
}
REGISTERS = ("eax", "ebx", "ecx", "edx")


@pytest.fixture(scope="module", autouse=True)
def _tools():
    if not (shutil.which("gcc") and shutil.which("qemu-x86_64")):
        pytest.fail("needs gcc and qemu-user: run `make engine`")


@pytest.fixture(scope="module")
def compiler():
    """The local gcc, as the table names it."""
    return compiler_name("gcc")


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The program by march, compiled without QEMU."""
    result = compiled_marches(tmp_path_factory.mktemp("programs"), "gcc", "x86_64")
    assert len(result) > 40
    return result


@pytest.fixture(scope="module")
def cpuid(tmp_path_factory):
    program = tmp_path_factory.mktemp("cpuid") / "cpuid"
    subprocess.run(["gcc", "-O1", "-static", "-o", program, HERE / "cpuid.c"], check=True)
    return program


def flags(start, cpuid):
    """Return the kernel's names of the flags in CPUID."""
    output = subprocess.run([*start, cpuid], capture_output=True, text=True, check=True).stdout
    result = set()
    for line in output.splitlines():
        leaf, subleaf, *values = line.split()
        for register, value in zip(REGISTERS, values, strict=True):
            names = BITS.get((leaf, subleaf, register), {})
            result |= {name for bit, name in names.items() if int(value, 16) >> bit & 1}
    return frozenset(result)


@pytest.mark.parametrize("model", MODELS)
def test_code_that_the_rule_accepts_runs_without_sigill(model, programs, compiler, cpuid):
    start = ["qemu-x86_64", "-cpu", model]
    allowed = accepted(programs, compiler, flags(start, cpuid))
    assert "x86-64" in allowed
    assert not killed(allowed, start)


def test_accepted_code_runs_on_this_machine(programs, compiler):
    allowed = accepted(programs, compiler, im.probe().cpu.flags)
    assert "x86-64" in allowed
    assert not killed(allowed)


def test_the_program_distinguishes_cpus(programs, compiler, cpuid):
    """Without this, the tests above would prove nothing."""
    start = ["qemu-x86_64", "-cpu", "Nehalem"]
    allowed = accepted(programs, compiler, flags(start, cpuid))
    refused = {march: program for march, program in programs.items() if march not in allowed}
    assert {"haswell", "skylake-avx512", "znver3", "x86-64-v3"} <= killed(refused, start)
