"""CPUs of QEMU that lack some flags.

QEMU has no AVX-512, and runs lzcnt and tzcnt as bsr and bsf where a CPU lacks them.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

__all__ = ["BESIDE", "FLAGS", "INSTEAD", "ended"]

VECTORS = frozenset(["pni", "ssse3", "sse4_1", "sse4_2"])
SCALARS = frozenset(["popcnt", "movbe", "bmi1", "bmi2", "cx16", "adx", "rdrand", "rdseed"])
# Those without which a program dies that needs them.
FLAGS = VECTORS | SCALARS | {"avx", "avx2", "fma", "f16c", "aes", "pclmulqdq", "sha_ni", "sse4a"}
# QEMU 7.2 runs shlx, sarx and shrx where there is BMI1, and some of AVX only where there is what every CPU
# with AVX has.
INSTEAD = {"bmi2": frozenset(["bmi1"])}
BESIDE = INSTEAD | {"avx": VECTORS}
SPELLED = {"sha_ni": "sha-ni"}  # by QEMU
LIMIT = 600  # seconds


def ended(
    command: Sequence[str | Path], without: Iterable[str], environment: Mapping[str, str] | None = None
) -> int:
    """Return the status of a command on a CPU that has all flags that QEMU has, but some."""
    model = ",".join(["max", *(f"-{SPELLED.get(flag, flag)}" for flag in sorted(without))])
    emulated = ["qemu-x86_64", "-cpu", model, *command]
    done = subprocess.run(emulated, capture_output=True, check=False, timeout=LIMIT, env=environment)
    return done.returncode
