"""The CPU flags that an audit reports, checked with QEMU on CPUs with and without each flag.

QEMU has no AVX-512, and runs lzcnt and tzcnt as bsr and bsf where a CPU lacks them.
"""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from compiling import compiled, scanned

HERE = Path(__file__).parent
SIGILL = -signal.SIGILL
MARCHES = ("x86-64", "x86-64-v2", "sandybridge", "haswell", "znver2")
VECTORS = frozenset(["pni", "ssse3", "sse4_1", "sse4_2"])
SCALARS = frozenset(["popcnt", "movbe", "bmi1", "bmi2", "cx16", "adx", "rdrand", "rdseed"])
FLAGS = VECTORS | SCALARS | {"avx", "avx2", "fma", "f16c", "aes", "pclmulqdq", "sha_ni", "sse4a"}
# QEMU 7.2 runs shlx, sarx and shrx where there is BMI1, and some of AVX only where there is what every CPU
# with AVX has.
INSTEAD = {"bmi2": frozenset(["bmi1"])}
BESIDE = INSTEAD | {"avx": VECTORS}
SPELLED = {"sha_ni": "sha-ni"}  # by QEMU
CLONES = """
double a[64];
__attribute__((target_clones("avx2,fma", "default"), noinline)) double sum(void) {
    double s = 0;
    for (int i = 0; i < 64; i++) s += a[i] * 3.5 + i;
    return s;
}
int main(int n, char **v) { a[n] = n; return sum() < 0; }
"""
FAST = '__attribute__((target("avx2,fma"), noinline)) static double fast(double *a)'
ASKING = """
double a[64];
FAST { double s = 0; for (int i = 0; i < 64; i++) s += a[i] * 3.5 + i; return s; }
int main(int n, char **v) { a[n] = n; return __builtin_cpu_supports("avx2") && fast(a) < 0; }
""".replace("FAST", FAST)


@pytest.fixture(scope="module", autouse=True)
def _qemu():
    if not (shutil.which("gcc") and shutil.which("qemu-x86_64")):
        pytest.fail("needs gcc and qemu-user: run `make engine`")


def ended(program, without):
    """Return the exit status of a program on a CPU with all flags of QEMU except some."""
    model = ",".join(["max", *(f"-{SPELLED.get(flag, flag)}" for flag in sorted(without))])
    command = ["qemu-x86_64", "-cpu", model, program]
    return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode


@pytest.mark.parametrize("options", [(), ("-static", "-s")])
@pytest.mark.parametrize("march", MARCHES)
def test_a_program_dies_without_required_flags_only(tmp_path, march, options):
    source = (HERE / "vectors.c").read_text()
    program = compiled(tmp_path / "built", source, "-O3", f"-march={march}", *options, "-lm")
    code = scanned(program)
    assert bool(code.required) == (march != "x86-64")
    judged = code.required & FLAGS
    result = {flag: ended(program, {flag} | INSTEAD.get(flag, set())) for flag in judged}
    assert result == dict.fromkeys(judged, SIGILL)
    beside = frozenset().union(*(BESIDE.get(flag, ()) for flag in judged))
    assert ended(program, FLAGS - code.required - beside) == 0


@pytest.mark.parametrize("source", [CLONES, ASKING])
def test_a_dispatching_program_runs_without_optional_flags(tmp_path, source):
    program = compiled(tmp_path / "built", source, "-O3")
    code = scanned(program)
    assert {"avx", "fma"} <= code.functions.keys()
    assert not code.required
    assert ended(program, FLAGS) == 0
