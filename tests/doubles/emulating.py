"""CPUs of QEMU that lack some flags.

QEMU has no AVX-512, and runs lzcnt and tzcnt as bsr and bsf where a CPU lacks them.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

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


def ended(
    command: Sequence[str | Path], without: Iterable[str], environment: Mapping[str, str] | None = None
) -> int:
    """Return the exit status of a command on a CPU with all flags that QEMU supports but `without`."""
    model = ",".join(["max", *(f"-{SPELLED.get(flag, flag)}" for flag in sorted(without))])
    emulated = ["qemu-x86_64", "-cpu", model, *command]
    done = subprocess.run(emulated, capture_output=True, check=False, timeout=LIMIT, env=environment)
    return done.returncode
