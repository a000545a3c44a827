"""CPUs of QEMU that lack some flags, and programs for marches to run on them.

QEMU has no AVX-512, and runs lzcnt and tzcnt as bsr and bsf where a CPU lacks them.

`ci/arm64` fetches what the CPUs of arm64 need. There, a program reads its CPU's flags where it reads them on
Linux: QEMU answers in place of /proc/cpuinfo.
"""

from __future__ import annotations

import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from imagematrix.hardware.host import cpu
from imagematrix.hardware.vendors import marches

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

VECTORS = frozenset(["pni", "ssse3", "sse4_1", "sse4_2"])
SCALARS = frozenset(["popcnt", "movbe", "bmi1", "bmi2", "cx16", "adx", "rdrand", "rdseed"])
# Flags that QEMU enforces: a program that needs one dies on a CPU without it.
FLAGS = VECTORS | SCALARS | {"avx", "avx2", "fma", "f16c", "aes", "pclmulqdq", "sha_ni", "sse4a"}
# QEMU 7.2 runs shlx, sarx and shrx on every CPU with BMI1, and some instructions of AVX only on a CPU that
# also has the older flags of every CPU with AVX.
INSTEAD = {"bmi2": frozenset(["bmi1"])}
BESIDE = INSTEAD | {"avx": VECTORS}
SPELLED = {"sha_ni": "sha-ni"}  # by QEMU
LIMIT = 600  # seconds
SIGILL = frozenset([-signal.SIGILL, 128 + signal.SIGILL])
ROOT = Path(__file__).parents[2]
VECTORS_SOURCE = ROOT / "tests/engine/vectors.c"
ARM64 = ROOT / ".cache/arm64"
ARM_GCC = str(ARM64 / "bin/gcc")
ARM_OBJDUMP = str(ARM64 / "bin/objdump")
ARM_QEMU = str(ARM64 / "bin/qemu-aarch64")
ARM_ROOT = ARM64 / "root"
ARM_PYTHON = ARM_ROOT / "usr/bin/python3"
ARM_MODELS = ("cortex-a53", "cortex-a72", "neoverse-n1", "neoverse-v1", "neoverse-n2", "a64fx", "max")


def ended(
    command: Sequence[str | Path], without: Iterable[str], environment: Mapping[str, str] | None = None
) -> int:
    """Return the exit status of a command on a CPU with all flags that QEMU supports but `without`."""
    model = ",".join(["max", *(f"-{SPELLED.get(flag, flag)}" for flag in sorted(without))])
    emulated = ["qemu-x86_64", "-cpu", model, *command]
    done = subprocess.run(emulated, capture_output=True, check=False, timeout=LIMIT, env=environment)
    return done.returncode


def fetch_arm64() -> None:
    """Fetch the compiler, the emulator and the Python for arm64, unless they are there."""
    subprocess.run([ROOT / "ci/arm64"], check=True)


def on_arm(model: str, command: Sequence[str | Path]) -> list[str | Path]:
    """Return the command that runs a program for arm64, and its libraries, on a CPU of QEMU."""
    return [ARM_QEMU, "-cpu", model, "-L", str(ARM_ROOT), *command]


def arm_flags(model: str) -> frozenset[str]:
    """Return the flags in the /proc/cpuinfo of a CPU of QEMU, as the probe reads it."""
    show = on_arm(model, [ARM_PYTHON, "-Sc", "print(open('/proc/cpuinfo').read())"])
    text = subprocess.run(show, capture_output=True, text=True, check=True, timeout=LIMIT).stdout
    return cpu.parse_cpu(text)[0].flags


def compiler_name(gcc: str) -> str:
    """Return a gcc as the table of marches names it: "gcc-12"."""
    version = subprocess.run([gcc, "-dumpversion"], capture_output=True, text=True, check=True).stdout
    return f"gcc-{version.partition('.')[0].strip()}"


def compiled_marches(folder: Path, gcc: str, arch: str) -> dict[str, Path]:
    """Return vectors.c as a static program by march, for all that the compiler knows and can link."""
    known = marches.list_known_names(compiler_name(gcc)) or frozenset()

    def compiled(march: str) -> Path | None:
        program = folder / march
        options = ("-O3", "-static", marches.get_option(march, arch), "-o", program, VECTORS_SOURCE, "-lm")
        done = subprocess.run([gcc, *options], capture_output=True, check=False)
        return program if done.returncode == 0 else None  # 32-bit CPUs are in gcc's list for x86, too

    names = sorted(march for march in known if marches.get_arch(march) == arch)
    with ThreadPoolExecutor(2) as pool:
        return {
            march: program for march, program in zip(names, pool.map(compiled, names), strict=True) if program
        }


def killed(programs: Mapping[str, Path], start: Sequence[str | Path] = ()) -> set[str]:
    """Return the names of the programs that end with SIGILL when `start` runs them."""

    def dies(program: Path) -> bool:
        done = subprocess.run([*start, program], capture_output=True, check=False, timeout=LIMIT)
        return done.returncode in SIGILL

    with ThreadPoolExecutor(2) as pool:
        return {name for name, died in zip(programs, pool.map(dies, programs.values()), strict=True) if died}


def accepted(programs: Mapping[str, Path], compiler: str, flags: frozenset[str]) -> dict[str, Path]:
    """Return the programs by march for which CPUs with these flags suffice, as a compiler defines marches."""
    needs = {march: marches.get_required_flags(march, compiler) for march in programs}
    return {march: program for march, program in programs.items() if (needs[march] or frozenset()) <= flags}
