"""Compares wheels that `imagematrix trim` has trimmed with the output of NVIDIA's cuobjdump, for every GPU.

    .venv/bin/python ci/judge_trim.py [--cuobjdump PROGRAM] [--compute CAP] WHEEL…

A wheel is a path, or a requirement such as cupy-cuda12x==14.2.0. The check covers each library with device
code and each compute capability from 5.2 on (or those given with `--compute`). cuobjdump must list exactly
the code that the rules keep, with the same contents as before; readelf must see the same sections and
segments; and a library that loaded before must still load. This script computes independently what the rules
keep, from the fatbins in the wheel.

CUDA 13's cuobjdump fails on some code for GPUs that it no longer supports. `--cuobjdump` names another
cuobjdump for those files, such as that of Debian's nvidia-cuda-toolkit.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from cuobjdump import cuobjdump, downloaded

from imagematrix.build.trim.rules import Rules
from imagematrix.build.trim.trim import trim
from imagematrix.hardware.vendors import device_code, versions

if TYPE_CHECKING:
    from collections.abc import Sequence

OLDEST = (5, 2)
COMPUTES = [
    word
    for word in device_code.list_capability_words()
    if word[-1].isdigit() and versions.make_sort_key(word) >= OLDEST
]
EXTRACTED = re.compile(r".*\.(\d+)\.sm_(\d+[af]?)\.(cubin|ptx)")
NAMES = (".nv_fatbin", "__nv_relfatbin")
KINDS = {1: "ptx", 2: "cubin"}

Code = tuple[str, str]  # kind and target


def main() -> None:
    """Compare each wheel; stop at the first difference."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuobjdump", type=Path, action="append", default=[])
    parser.add_argument("--compute", choices=COMPUTES, action="append", metavar="CAP")
    parser.add_argument("wheels", nargs="+", metavar="WHEEL")
    options = parser.parse_args()
    computes = options.compute or COMPUTES
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        judges = [cuobjdump(folder), *(judge.absolute() for judge in options.cuobjdump)]
        for word in options.wheels:
            started = time.monotonic()
            own = folder / "wheel"
            wheel = Path(word) if Path(word).is_file() else downloaded(folder / "download", word)
            files = _libraries(wheel, own)
            compared = sum(_compared(judges, own, file, computes) for file in files)
            taken = time.monotonic() - started
            print(f"{wheel.name.split('-')[0]}: {len(files)} files, {len(computes)} GPUs, ", end="")
            print(f"{compared} entries unchanged, {taken:.0f} s", flush=True)
            shutil.rmtree(own)


def _libraries(wheel: Path, folder: Path) -> list[Path]:
    """Unpack a wheel, and return its files with fatbins."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    report = trim([folder], Rules(computes=("9.0",), nvidia=True), dry_run=True)
    return [Path(result.path) for result in report.results]


def _compared(judges: list[Path], folder: Path, file: Path, computes: Sequence[str]) -> int:
    """Return the number of entries compared, over all GPUs."""
    containers = _containers(file)
    entries = [entry for container in containers for entry in container]
    judge, hashes = _hashes(judges, file, entries)
    loads = _loads(folder, file)
    headers = _headers(file)
    compared = 0
    listings: dict[str, Counter[tuple[Code, str]]] = {}  # by digest: several GPUs may get the same file
    for compute in computes:
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            trim([file], Rules(computes=(compute,), nvidia=True), output=Path(name))
            trimmed = Path(name, file.name)
            with trimmed.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            if digest not in listings:
                listings[digest] = Counter(_listed(judge, trimmed))
                if _headers(trimmed) != headers:
                    raise SystemExit(f"{file} for {compute}: readelf sees another structure")
                if loads and not _loads(folder, trimmed):
                    raise SystemExit(f"{file} for {compute}: no longer loads")
            after = listings[digest]
            expected: Counter[tuple[Code, str]] = Counter()
            at = 0
            for container in containers:
                for place in _staying(container, compute):
                    expected[_shown(entries[at + place]), hashes[at + place]] += 1
                at += len(container)
            if after != expected:
                raise SystemExit(f"{file} for {compute}: {after - expected} and not {expected - after}")
            compared += expected.total()
            print(f"  {file.name} for {compute}: {expected.total()} entries", file=sys.stderr, flush=True)
    return compared


def _staying(container: list[Code], compute: str) -> list[int]:
    cubins = [
        i
        for i, (kind, target) in enumerate(container)
        if kind == "cubin" and device_code.can_run_cubin(target, compute)
    ]
    texts = [
        i
        for i, (kind, target) in enumerate(container)
        if kind == "ptx" and device_code.can_compile_ptx(target, compute)
    ]
    return cubins or texts or list(range(len(container)))


def _hashes(judges: list[Path], file: Path, entries: list[Code]) -> tuple[Path, list[str]]:
    """Return a cuobjdump that can read all of a file, and the hashes of the file's entries.

    cuobjdump numbers cubins, and PTX, in the order of the file.
    """
    for judge in judges:
        listed = _listed(judge, file)
        by_kind = {kind: [one for one in listed if one[0][0] == kind] for kind in KINDS.values()}
        order = [by_kind[kind].pop(0) if by_kind[kind] else (("", ""), "") for kind, _ in entries]
        if [code for code, _ in order] == list(map(_shown, entries)) and len(listed) == len(entries):
            return judge, [digest for _, digest in order]
    raise SystemExit(f"{file}: no cuobjdump lists what is there")


def _shown(code: Code) -> Code:
    """Return an entry as cuobjdump shows it: it does not show that code is for a family."""
    return code[0], code[1].rstrip("f")


def _listed(judge: Path, file: Path) -> list[tuple[Code, str]]:
    """Return the entries that cuobjdump extracts, by number: kind and target, and the hash of the content."""
    entries: list[tuple[int, Code, str]] = []
    for option in ("-xelf", "-xptx"):
        with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
            words = [str(judge), "-all", option, "all", str(file.absolute())]
            subprocess.run(words, cwd=name, check=False, capture_output=True)
            for path in Path(name).iterdir():
                match = EXTRACTED.fullmatch(path.name)
                if match:
                    digest = hashlib.sha256(path.read_bytes()).hexdigest()
                    entries.append((int(match[1]), _shown((match[3], match[2])), digest))
    return [(code, digest) for _, code, digest in sorted(entries)]


def _containers(file: Path) -> list[list[Code]]:
    """Return the entries of each fatbin, read without the package's own reader."""
    containers: list[list[Code]] = []
    for section in NAMES:
        with tempfile.NamedTemporaryFile(dir=file.parent) as copy:
            words = ["objcopy", "-O", "binary", f"--only-section={section}", "--set-section-flags"]
            subprocess.run([*words, f"{section}=alloc", file, copy.name], check=True, capture_output=True)
            raw = Path(copy.name).read_bytes()
        at = 0
        while (at := raw.find(b"\x50\xed\x55\xba\x01\x00\x10\x00", at)) >= 0:
            end = at + 16 + struct.unpack_from("<Q", raw, at + 8)[0]
            container: list[Code] = []
            at += 16
            while at < end:
                kind, own, payload = struct.unpack_from("<H2xIQ", raw, at)
                number, flags = struct.unpack_from("<I8xQ", raw, at + 28)
                suffix = "a" if flags >> 20 & 1 else "f" if flags >> 21 & 1 else ""
                container.append((KINDS[kind], f"{number}{suffix}"))
                at += own + payload
            containers.append(container)
    return containers


def _headers(file: Path) -> str:
    said = subprocess.run(["readelf", "-SlW", file], check=True, capture_output=True, text=True).stdout
    return said.replace(str(file), "")


def _loads(folder: Path, file: Path) -> bool:
    places = ":".join(sorted({str(path.parent) for path in folder.rglob("*.so*")}))
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    words = [sys.executable, "-c", code, str(file)]
    return (
        subprocess.run(words, env={"LD_LIBRARY_PATH": places}, check=False, capture_output=True).returncode
        == 0
    )


main()
