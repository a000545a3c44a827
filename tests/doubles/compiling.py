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


def assembled(target: Path, *options: str, **functions: tuple[int | str, ...]) -> Path:
    """Make a file for aarch64, by default a library, from functions, each a name with its instruction words.

    A function whose name begins with "hidden" is not exported.
    """
    lines = []
    for name, words in functions.items():
        hidden = f".hidden {name}; " if name.startswith("hidden") else ""
        code = ", ".join(f"{word:#x}" if isinstance(word, int) else word for word in words)
        lines.append(
            f".globl {name}; {hidden}.type {name},@function; {name}: .long {code}; .size {name},.-{name}"
        )
    source = "asm(" + " ".join(f'"{line}\\n"' for line in (".text", *lines)) + ");"
    compiled(target, source, "-nostdlib", *(options or ["-shared", "-fPIC"]))
    raw = bytearray(target.read_bytes())
    raw[18:20] = elf.AARCH64.to_bytes(2, "little")
    target.write_bytes(raw)
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
