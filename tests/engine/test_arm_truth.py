"""Test the rule `cpu`, and the flags that an audit reports, with code for arm64 on CPUs of QEMU.

What the rule accepts never dies of SIGILL, and there is code that dies on each CPU that it is refused for.
GNU's assembler, which refuses instructions of extensions that it was not told, judges single instructions.
"""

import random
import re
import struct
import subprocess

import pytest
from compiling import compiled, scanned
from emulating import (
    ARM_GCC,
    ARM_MODELS,
    ARM_OBJDUMP,
    accepted,
    arm_flags,
    compiled_marches,
    compiler_name,
    fetch_arm64,
    killed,
    on_arm,
)

from imagematrix.audit.binaries.cpu.arm import Arm

pytestmark = pytest.mark.long

AUDITED = ("armv8-a", "armv8.1-a", "cortex-a72", "neoverse-n1", "neoverse-v1", "neoverse-n2", "a64fx")
# An instruction of each flag, and the march for which the compiler may use it.
NEEDING = {
    "atomics": ("armv8-a+lse", "return __atomic_fetch_add(&n, 1, __ATOMIC_SEQ_CST) < 0;"),
    "sve": ("armv8.2-a+sve", "return svcntb() == (unsigned)n;"),
    "sve2": (
        "armv8.2-a+sve2",
        "return svaddv_s32(svptrue_b32(), svaddlb_s32(svdup_s16(n), svdup_s16(1))) < 0;",
    ),
    "i8mm": (
        "armv8.2-a+i8mm",
        "int8x16_t a = vdupq_n_s8(n); return vgetq_lane_s32(vmmlaq_s32(vdupq_n_s32(n), a, a), 0) < 0;",
    ),
    "bf16": (
        "armv8.2-a+bf16",
        "bfloat16x8_t a = {1}; return vgetq_lane_f32(vbfdotq_f32(vdupq_n_f32(n), a, a), 0) < 0;",
    ),
}
# The least that the assembler has to be told for instructions with a flag, in this order.
ASSEMBLED = {
    "sve": "sve",
    "sve2": "sve2",
    "svebitperm": "sve2-bitperm",
    "sveaes": "sve2-aes",
    "svepmull": "sve2-aes",
    "svesha3": "sve2-sha3",
    "svesm4": "sve2-sm4",
    "svei8mm": "sve+i8mm",
    "svebf16": "sve+bf16",
    "svef32mm": "sve+f32mm",
    "svef64mm": "sve+f64mm",
}
VECTORS = (0x04, 0x05, 0x24, 0x25, 0x44, 0x45, 0x64, 0x65, 0x84, 0x85, 0xA4, 0xA5, 0xC4, 0xC5, 0xE4, 0xE5)
WORDS = 20_000
PROGRAM = "/opt/program"  # in an image; a name such as armv8.1-a would say that the CPU chooses it
SOURCE = "#include <arm_neon.h>\n{header}\nint main(int n, char **v) {{ (void)v; {body} }}\n"


@pytest.fixture(scope="module", autouse=True)
def _tools():
    fetch_arm64()


@pytest.fixture(scope="module")
def flags():
    """The flags of each CPU."""
    return {model: arm_flags(model) for model in ARM_MODELS}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The program by march."""
    result = compiled_marches(tmp_path_factory.mktemp("programs"), ARM_GCC, "aarch64")
    assert len(result) > 80
    return result


@pytest.mark.parametrize("model", ARM_MODELS)
def test_code_that_the_rule_accepts_runs_without_sigill(model, programs, flags):
    allowed = accepted(programs, compiler_name(ARM_GCC), flags[model])
    assert {"armv8-a", "cortex-a53"} <= allowed.keys()
    assert not killed(allowed, on_arm(model, []))


def test_the_program_distinguishes_cpus(programs, flags):
    """Without this, the tests above would prove nothing."""
    allowed = accepted(programs, compiler_name(ARM_GCC), flags["cortex-a72"])
    refused = {march: program for march, program in programs.items() if march not in allowed}
    died = killed(refused, on_arm("cortex-a72", []))
    assert {"armv8.1-a", "neoverse-n1", "neoverse-v1", "neoverse-v2", "a64fx"} <= died


@pytest.mark.parametrize("march", AUDITED)
def test_a_program_runs_where_the_audit_says(march, programs, flags):
    required = scanned(programs[march], PROGRAM).required
    assert bool(required) == (march not in {"armv8-a", "cortex-a72"})
    died = {model for model in ARM_MODELS if killed({march: programs[march]}, on_arm(model, []))}
    assert died == {model for model in ARM_MODELS if not required <= flags[model]}


@pytest.mark.parametrize("flag", NEEDING)
def test_a_program_dies_on_the_cpus_without_its_instruction(tmp_path, flag, flags):
    march, body = NEEDING[flag]
    header = "#include <arm_sve.h>" if flag.startswith("sve") else ""
    source = SOURCE.format(header=header, body=body)
    program = compiled(tmp_path / flag, source, "-O2", "-static", f"-march={march}", compiler=ARM_GCC)
    assert flag in scanned(program, PROGRAM).required
    died = {model for model in ARM_MODELS if killed({flag: program}, on_arm(model, []))}
    assert died == {model for model in ARM_MODELS if flag not in flags[model]}
    assert set(ARM_MODELS) > died > set()


def test_instructions_of_scalable_vectors_are_read_as_the_assembler_reads_them(tmp_path):
    chosen = random.Random(4)  # noqa: S311 - a sample
    words = [chosen.choice(VECTORS) << 24 | chosen.getrandbits(24) for _ in range(WORDS)]
    (tmp_path / "words").write_bytes(struct.pack(f"<{WORDS}I", *words))
    listed = subprocess.run(
        [ARM_OBJDUMP, "-D", "-b", "binary", "-m", "aarch64", tmp_path / "words"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = re.findall(r"^ *[0-9a-f]+:\t([0-9a-f]{8}) \t([a-z][^/\n]*)", listed, re.MULTILINE)
    texts = {int(word, 16): text for word, text in lines if not text.startswith("udf")}
    assert len(texts) > WORDS / 2

    def refused(extensions):
        options = [f"-march=armv8.2-a+{extensions}", "-c", "-x", "assembler", "-", "-o", "/dev/null"]
        source = "\n".join(texts.values()) + "\n"
        said = subprocess.run([ARM_GCC, *options], input=source, capture_output=True, text=True, check=False)
        numbers = re.findall(r"^\{standard input\}:(\d+): Error: selected", said.stderr, re.MULTILINE)
        return {list(texts)[int(number) - 1] for number in numbers}

    without = {extensions: refused(extensions) for extensions in {"fp", *ASSEMBLED.values()}}
    seen = set()
    for word, text in texts.items():
        enough = [flag for flag, extensions in ASSEMBLED.items() if word not in without[extensions]]
        if enough and word in without["fp"]:  # others need what no CPU of QEMU has
            flag = Arm()._find_flag(word)
            assert ASSEMBLED.get(flag) == ASSEMBLED[enough[0]], (hex(word), text)
            seen.add(flag)
    assert seen >= {"sve", "sve2", "svebitperm", "svepmull", "svei8mm", "svebf16", "svef64mm"}
