"""Programs and libraries compiled with the local compiler, and an audit's findings in their instructions."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from imagematrix.audit.binaries import elf
from imagematrix.audit.binaries.cpu import scan
from imagematrix.audit.binaries.window import Window

if TYPE_CHECKING:
    from pathlib import Path

    from imagematrix.audit.binaries.host_code import HostCode

CPUID = '__builtin_cpu_supports("avx2")'
NEWER = '__attribute__((target("avx2,fma")))'  # of functions for newer CPUs
LOOPS = "for (int i = 0; i < 64; i++) a[i] = a[i] * {n}.5 + i; for (int i = 0; i < 64; i++) b[i] *= {n};"


def compiled(target: Path, source: str, *options: str, compiler: str = "gcc") -> Path:
    """Compile C to a program, or with -shared to a library."""
    command: list[str | Path] = [compiler, "-x", "c", "-", "-x", "none", "-o", target, *options]
    subprocess.run(command, input=source, text=True, check=True)
    return target


def choosing(newer: int, older: int, name: str = "f") -> str:
    """Return functions for newer CPUs, functions for all CPUs, and one that asks for the CPU."""
    targets = enumerate([NEWER] * newer + [""] * older, 3)
    bodies = [
        f"{target} void {name}{n}(double *a, int *b) {{ {LOOPS.format(n=n)} }}" for n, target in targets
    ]
    return "\n".join([*bodies, f"int asks(void) {{ return {CPUID}; }}"])


def scanned(path: Path, name: str | None = None) -> HostCode:
    """Return what the code of a file at the path `name` of an image needs."""
    with path.open("rb") as file:
        window = Window(file, 0, path.stat().st_size)
        headers = elf.read_elf(window)
        assert headers is not None
        assert scan.is_decodable(headers, window)
        return scan.scan_file(name or f"/opt/{path.name}", headers, window)
