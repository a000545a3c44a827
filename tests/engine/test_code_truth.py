"""The CPU flags that an audit reports, checked with QEMU on CPUs with and without each flag.

`ci/bench/judge.py` does the same with larger programs.
"""

import shutil
import signal
from pathlib import Path

import pytest
from compiling import compiled, scanned
from emulating import BESIDE, FLAGS, INSTEAD, ended

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
SIGILL = -signal.SIGILL
MARCHES = ("x86-64", "x86-64-v2", "sandybridge", "haswell", "znver2")
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


@pytest.mark.parametrize("options", [(), ("-static", "-s")])
@pytest.mark.parametrize("march", MARCHES)
def test_a_program_dies_without_required_flags_only(tmp_path, march, options):
    source = (HERE / "vectors.c").read_text()
    program = compiled(tmp_path / "built", source, "-O3", f"-march={march}", *options, "-lm")
    code = scanned(program)
    assert bool(code.required) == (march != "x86-64")
    judged = code.required & FLAGS
    result = {flag: ended([program], {flag} | INSTEAD.get(flag, set())) for flag in judged}
    assert result == dict.fromkeys(judged, SIGILL)
    beside = frozenset().union(*(BESIDE.get(flag, ()) for flag in judged))
    assert ended([program], FLAGS - code.required - beside) == 0


@pytest.mark.parametrize("source", [CLONES, ASKING])
def test_a_dispatching_program_runs_without_optional_flags(tmp_path, source):
    program = compiled(tmp_path / "built", source, "-O3")
    code = scanned(program)
    assert {"avx", "fma"} <= code.functions.keys()
    assert not code.required
    assert ended([program], FLAGS) == 0
