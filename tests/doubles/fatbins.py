"""Fatbins, and files with fatbins in them, as written by CUDA toolkits."""

from __future__ import annotations

import struct
import subprocess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

PTX, CUBIN, LTO = 1, 2, 8
SPECIFIC, FAMILY = 1 << 20, 1 << 21


def entry(kind: int = CUBIN, target: int = 90, payload: bytes = b"", own: int = 64, suffix: int = 0) -> bytes:
    isa = (4, 8)  # minor and major
    head = struct.pack("<HHIQ8sHHI8sQ", kind, 0x101, own, len(payload), b"", *isa, target, b"", 0x11 | suffix)
    return head.ljust(own, b"\0") + payload


def cubin(*kernels: str) -> bytes:
    """Return the beginning of a cubin with these kernels: its header and the names of sections."""
    names = ["", ".shstrtab", ".strtab", ".symtab", ".nv.info", *(f".text.{name}" for name in kernels)]
    names += [f".nv.info.{name}" for name in kernels]
    return b"\x7fELF\2\1\1\x33\7".ljust(64, b"\0") + "\0".join([*names, ".nv.callgraph", ""]).encode()


def fat(*entries: bytes) -> bytes:
    body = b"".join(entries)
    body += bytes(-len(body) % 8)  # fatbins begin at multiples of 8
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(path: Path, *fatbins: bytes, soname: str | None = None) -> Path:
    """Compile a loadable library that contains fatbins."""
    source, raw = path.with_suffix(".c"), path.with_suffix(".raw")
    source.write_text("int answer(void) { return 42; }\n")
    named = [f"-Wl,-soname,{soname}"] if soname else []
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, source, *named], check=True)
    raw.write_bytes(b"".join(fatbins))
    options = [f"--add-section=.nv_fatbin={raw}", "--set-section-alignment", ".nv_fatbin=8"]
    subprocess.run(["objcopy", *options, path], check=True)
    source.unlink()
    raw.unlink()
    return path
