"""Tests the CPU flags that an audit reports for programs: QEMU runs the programs on CPUs without the flags.

    .venv/bin/python ci/bench/judge.py [--only GROUP]

Each required flag is removed, one at a time: the program must crash, or refuse to start. Then all flags that
are not required are removed: the program must run, unless the audit leaves some of them undecided. The
programs are those of the benchmark, and numpy and ffmpeg from the Python Package Index. The script needs gcc,
g++ and qemu-user. The exit code is 1 if a program proves an audit wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from compiling import Tools, programs, shipped
from samples import ROOT

sys.path.append(str(ROOT / "tests" / "doubles"))  # behind this folder

from emulating import BESIDE, FLAGS, INSTEAD, ended

from imagematrix.audit.binaries import elf
from imagematrix.audit.binaries.cpu import scan
from imagematrix.audit.binaries.window import Window
from imagematrix.hardware.vendors import marches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from imagematrix.audit.binaries.host_code import HostCode

# The first march, and the marches of the shipped matrix that gcc 12 knows.
MARCHES = (
    *("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4", "broadwell", "skylake-avx512", "icelake-server"),
    *("sapphirerapids", "znver2", "znver3"),
)
FEW = ("x86-64-v2", "x86-64-v3")  # for programs that take long to build
FFMPEG = "imageio-ffmpeg==0.6.0"
NUMPY = """
import numpy
numbers = numpy.random.default_rng(14).random((200, 200))
assert abs((numbers @ numpy.linalg.inv(numbers)).trace() - 200) < 1e-6
assert (numpy.sort(numbers.ravel())[1:] >= numpy.sort(numbers.ravel())[:-1]).all()
"""
ENCODE = (
    *("-loglevel", "error", "-f", "lavfi", "-i", "testsrc=duration=0.2:size=128x96"),
    *("-c:v", "libx264", "-f", "null", "-"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command, and the files whose code it runs."""

    name: str
    files: Sequence[Path]
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    def runs(self, without: Iterable[str]) -> bool:
        """Whether it succeeds on a CPU without the given flags."""
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **self.environment}
        return ended(self.command, without, environment) == 0


def main() -> int:
    """Judge each case; return 1 if one proves an audit wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=GROUPS, help="this group; without it, all")
    groups = parser.parse_args().only or GROUPS
    wrong = False
    print("| code | required | undecided | without what is required | without the rest |")
    print("|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        for case in chain(*(GROUPS[group](Path(name, group)) for group in groups)):
            row, right = _judged(case)
            wrong |= not right
            print(f"| {' | '.join([case.name, *row])} |{'' if right else ' WRONG'}", flush=True)
    return int(wrong)


def _judged(case: Case) -> tuple[list[str], bool]:
    """Return the audit's result, the observed behaviour, and whether they agree."""
    codes = [code for file in case.files if (code := _code(file))]
    required = frozenset().union(*(code.required for code in codes))
    undecided = frozenset().union(*(code.undecided_flags for code in codes)) - required
    said = [_words(required), _words(undecided)]
    if not case.runs(()):
        beyond = required - FLAGS - dict(marches.LEVELS)["x86-64-v3"]
        return [*said, "dies: QEMU lacks some of it", ""], bool(beyond)
    survived = [flag for flag in required & FLAGS if case.runs({flag} | INSTEAD.get(flag, frozenset()))]
    beside = frozenset().union(*(BESIDE.get(flag, ()) for flag in required))
    rest = case.runs(FLAGS - required - beside)
    dies = "" if not required & FLAGS else f"runs without {_words(survived)}" if survived else "crashes"
    return [*said, dies, "runs" if rest else "dies"], not survived and (rest or bool(undecided & FLAGS))


def _words(flags: Iterable[str]) -> str:
    return " ".join(sorted(flags))


def _code(path: Path) -> HostCode | None:
    with path.open("rb") as file:
        window = Window(file, 0, path.stat().st_size)
        headers = elf.read_elf(window)
        if headers is None or not scan.is_decodable(headers, window):
            return None
        return scan.scan_file(f"/opt/{path.name}", headers, window)


def _shipped(folder: Path) -> Iterator[Case]:
    for march in MARCHES:
        shipped(folder, [march])
        train = folder / "training" / march / "train"
        yield Case(name=f"the shipped program, {march}", files=[train], command=(str(train), "--steps", "20"))


def _wheels(folder: Path) -> Iterator[Case]:
    tools = Tools(folder)
    libraries = tools.installed("numpy", FFMPEG)
    modules = [*libraries.glob("numpy/**/*.so"), *libraries.glob("numpy.libs/*.so*")]
    yield Case(name="numpy", files=modules, command=(str(tools.python), "-c", NUMPY))
    (ffmpeg,) = libraries.glob("imageio_ffmpeg/binaries/ffmpeg-*")
    yield Case(name="ffmpeg", files=[ffmpeg], command=(str(ffmpeg), *ENCODE))


def _built(folder: Path) -> Iterator[Case]:
    for program in programs(folder, FEW):
        own = [*folder.glob("llama/bin/*.so")] if "llama" in program.name else []
        for variant, command in program.variants.items():
            if command[0] != "sh":  # the shipped program, again
                yield Case(
                    name=f"{program.name}, {variant}",
                    files=[*own, *_files(map(Path, command))],
                    command=command,
                    environment=program.environments.get(variant, {}),
                )


def _files(words: Iterable[Path]) -> Iterator[Path]:
    """Yield the files of a command; for a folder, only llama.cpp's backends, as nothing else is loaded."""
    for word in words:
        yield from word.glob("libggml-cpu*.so") if word.is_dir() else [word] if word.is_file() else []


GROUPS = {"shipped": _shipped, "wheels": _wheels, "built": _built}
sys.exit(main())
