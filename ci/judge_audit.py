"""Compares the device code that an audit reads with the device code that NVIDIA's cuobjdump lists.

    .venv/bin/python ci/judge_audit.py [--cuobjdump PROGRAM] PATH|WHEEL…

Each argument is a file, a folder such as an unpacked toolkit, a wheel, or a requirement such as
cupy-cuda12x==14.2.0. For each program, library, static library, cubin and fatbin in it, the targets of the
cubins and of the PTX must be the same. CUDA 13's cuobjdump fails on some code for GPUs that it no longer
supports; `--cuobjdump` names another cuobjdump for those files. The exit code is 1 if a file differs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from cuobjdump import cuobjdump, downloaded

from imagematrix.audit.binaries import archives, cubin, elf, fatbin, objects
from imagematrix.audit.binaries.archives import HEAD
from imagematrix.audit.binaries.window import Window

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LINE = re.compile(r"\.sm_(\d+[af]?)\.(cubin|ptx)$", re.MULTILINE)
READ = (elf.MAGIC, archives.AR, fatbin.MAGIC)  # the first bytes of files that cuobjdump reads

Targets = tuple[set[str], set[str]]  # of cubins and of PTX


def main() -> int:
    """Compare all files; return 1 if one differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuobjdump", type=Path, action="append", default=[])
    parser.add_argument("places", nargs="+", metavar="PATH|WHEEL")
    options = parser.parse_args()
    wrong = False
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        judges = [cuobjdump(folder), *(judge.absolute() for judge in options.cuobjdump)]
        for place in options.places:
            same: Counter[bool] = Counter()  # by whether they have device code
            unknown = []
            with tempfile.TemporaryDirectory(dir=folder) as own:
                for file in _files(place, Path(own)):
                    ours = _ours(file)
                    if ours is None:
                        continue
                    listed = _listed(judges, file)
                    if listed == ours:
                        same[any(ours)] += 1
                    elif listed is not None:
                        wrong = True
                        print(f"{file}: {ours}, but cuobjdump lists {listed}", flush=True)
                    else:
                        unknown.append(file.name)
            left = f"; no cuobjdump can read {', '.join(unknown)}" if unknown else ""
            print(f"{place}: {same[True]} files with device code agree with cuobjdump, ", end="")
            print(f"and {same[False]} files without{left}", flush=True)
    return int(wrong)


def _files(place: str, folder: Path) -> Iterator[Path]:
    path = Path(place)
    if path.is_dir():
        yield from sorted(one for one in path.rglob("*") if one.is_file() and not one.is_symlink())
        return
    if path.is_file() and path.suffix != ".whl":
        yield path
        return
    with zipfile.ZipFile(path if path.is_file() else downloaded(folder / "wheel", place)) as wheel:
        for member in wheel.infolist():
            with wheel.open(member) as file:
                worth = objects.is_interesting(member.filename, file.read(HEAD))
            if worth:
                extracted = folder / wheel.extract(member, folder)
                yield extracted
                extracted.unlink()


def _ours(file: Path) -> Targets | None:
    """Return the targets that an audit reads; None for a file that cuobjdump does not read."""
    with file.open("rb") as opened:
        window = Window(opened, 0, file.stat().st_size)
        if not window.read_at(0, HEAD).startswith(READ):
            return None
        result = objects.examine_file(file.name, window, elf.read_elf(window))
    if result is None:
        return set(), set()
    code = result.code
    return set(map(_shown, code.cubins)), {_shown(target) for target, _ in code.ptx}


def _listed(judges: Sequence[Path], file: Path) -> Targets | None:
    """Return the targets listed by the first cuobjdump that can read the file; None if none can."""
    for judge in judges:
        words: list[str | Path] = [judge, "--list-elf", "--list-ptx", file]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if "fatal" not in done.stderr:
            listed = LINE.findall(done.stdout)
            cubins, texts = (
                {_shown(one) for one, kind in listed if kind == each} for each in ("cubin", "ptx")
            )
            return cubins, texts
    return None


def _shown(target: str) -> str:
    """Return a target without the suffix that cuobjdump shows wrongly.

    cuobjdump does not show that code is for a family. It shows handwritten code in cuBLAS 12.4 as code for
    50a, 60a and 61a, because of a flag of the cubin that has another meaning before 90. In the fatbin, the
    targets are 50, 60 and 61.
    """
    return target.rstrip("f" if int(target.rstrip("af")) >= cubin.FIRST_SPECIFIC else "a")


sys.exit(main())
