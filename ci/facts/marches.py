"""Query compilers for the flags that each -march and -mcpu enables, and update marches.json.

Every `gcc-N` and `clang-N` on PATH is used, and `aarch64-linux-gnu-gcc-N` for aarch64 (clang compiles for
both). Compilers in the table that are not on PATH are not changed. For gcc, Debian's cpp-N packages suffice,
unpacked, with a `gcc-N` that calls `cpp-N`.

A macro that looks like an instruction set but has no flag is reported on stderr: add it to
imagematrix/hardware/vendors/macros.py with a flag, or to NAMELESS here. Instructions that compilers use on
aarch64 without a macro (see `macros.list_unannounced_flags`) show only in their assembly: check it for each
new version.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from imagematrix.hardware.vendors import macros

TABLE = Path(__file__).parents[2] / "imagematrix" / "hardware" / "vendors" / "marches.json"
MAJORS = range(9, 40)
ARM_VERSIONS = [
    f"armv{major}{minor}-a" for major in (8, 9) for minor in ("", *(f".{n}" for n in range(1, 10)))
]
INSTRUCTIONS = re.compile(r"#define ((?!__FLT)__[A-Z0-9_]+__|__ARM_FEATURE_\w+) 1$", re.MULTILINE)
# Privileged, without a flag in /proc/cpuinfo or with one in recent kernels only, or no instructions at all:
# AVX10.1 is a name for AVX-512 sets that have macros of their own.
NAMELESS = {
    "__AVX10_1_256__",
    "__AVX10_1_512__",
    "__AVX10_1__",
    "__AVX10_2_512__",
    "__EVEX256__",
    "__EVEX512__",
    "__HRESET__",
    "__INVPCID__",
    "__KL__",
    "__PCONFIG__",
    "__PREFETCHI__",
    "__PREFETCHWT1__",
    "__PTWRITE__",
    "__RAOINT__",
    "__RDPRU__",
    "__UINTR__",
    "__USERMSR__",
    "__USER_MSR__",
    "__WIDEKL__",
    "__ARM_FEATURE_CRYPTO",
    "__ARM_FEATURE_LOCALLY_STREAMING",
    "__ARM_FEATURE_LS64",
    "__ARM_FEATURE_SVE_VECTOR_OPERATORS",
}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", type=Path, default=TABLE, help="the file to merge into")
    parser.add_argument("--as-of", help="the date to record in it")
    arguments = parser.parse_args()
    data = json.loads(arguments.table.read_text())
    table = {arch: expand(data[arch]) for arch in macros.FLAGS}
    for compiler, arch, command in installed():
        answers = ask(command, arch)
        data["compilers"].setdefault(compiler, {})[arch] = version(command)
        for sets in table[arch].values():
            sets.pop(compiler, None)
        for march, flags in answers.items():
            table[arch].setdefault(march, {})[compiler] = flags
        print(f"{compiler} {arch}: {len(answers)}")
    for march, sets in table["aarch64"].items():  # including entries of compilers that were not queried
        for compiler, flags in sets.items():
            sets[compiler] = add_unannounced(march, frozenset(flags.split()))
    data["compilers"] = {name: data["compilers"][name] for name in sorted(data["compilers"], key=by_major)}
    data |= {arch: shrink(table[arch]) for arch in table}
    data["as_of"] = arguments.as_of or data["as_of"]
    arguments.table.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def installed() -> list[tuple[str, str, list[str]]]:
    """Return the compilers on PATH: the name in the table, the architecture, and the command."""
    compilers = []
    for major in MAJORS:
        gcc, cross, clang = f"gcc-{major}", f"aarch64-linux-gnu-gcc-{major}", f"clang-{major}"
        compilers += [
            (gcc, "x86_64", [gcc]),
            (gcc, "aarch64", [cross]),
            (clang, "x86_64", [clang, "--target=x86_64-linux-gnu"]),
            (clang, "aarch64", [clang, "--target=aarch64-linux-gnu"]),
        ]
    return [item for item in compilers if shutil.which(item[2][0])]


def ask(command: list[str], arch: str) -> dict[str, str]:
    """Return the flags required by each CPU name that the compiler knows."""
    own = "-march" if arch == "x86_64" else "-mcpu"
    options = [f"{own}={name}" for name in names(command, own)]
    if arch == "aarch64":
        options += [f"-march={name}" for name in ARM_VERSIONS]
    generic = preprocess(command, "-march=x86-64" if arch == "x86_64" else "-march=armv8-a").stdout
    candidates = {*macros.FLAGS[arch], *NAMELESS, *INSTRUCTIONS.findall(generic)}
    answers = {}
    unknown: set[str] = set()
    for option in options:
        result = preprocess(command, option)
        if result.returncode == 0:
            name = option.partition("=")[2]
            unknown |= set(INSTRUCTIONS.findall(result.stdout)) - candidates
            answers[name] = " ".join(sorted(macros.parse_flags(result.stdout, arch)))
    if unknown:
        print(f"{command[0]}: no flag for {' '.join(sorted(unknown))}", file=sys.stderr)
    return answers


def add_unannounced(march: str, flags: frozenset[str]) -> str:
    """Return `flags` with those that compilers need for `march` on aarch64 and have no macro for."""
    return " ".join(sorted(flags | macros.list_unannounced_flags(march, flags)))


def names(command: list[str], option: str) -> list[str]:
    """Return the CPU names among the values of `option` that the compiler lists."""
    message = preprocess(command, f"{option}=unknown").stderr
    if " are: " in message:
        listed = re.split(r"[ ,]+", message.partition(" are: ")[2].partition("\n")[0].partition(";")[0])
    else:
        printed = run([*command, "--print-supported-cpus"])
        listed = re.findall(r"^\t(\S+)", printed.stdout + printed.stderr, re.MULTILINE)
    return [name for name in listed if name != "native" and not name.startswith("generic")]


def preprocess(command: list[str], option: str) -> subprocess.CompletedProcess[str]:
    """Run the compiler so that it prints its predefined macros."""
    return run([*command, option, "-dM", "-E", "-x", "c", "-"])


def version(command: list[str]) -> str:
    """Return the compiler's version line, without the name it was called by."""
    line = run([*command, "--version"]).stdout.partition("\n")[0]
    return re.sub(r"^\S*(gcc|cpp)\S* ", "", line)


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run `command` with nothing on stdin and plain English messages."""
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
    return subprocess.run(command, input="", capture_output=True, text=True, check=False, env=environment)


def by_major(compiler: str) -> tuple[str, int]:
    """Sort key for compilers."""
    family, _, major = compiler.partition("-")
    return family, int(major)


def expand(sets: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Convert the file's format (march, compilers: flags) to one entry for each compiler."""
    return {
        march: {name: flags for names, flags in entry.items() for name in names.split()}
        for march, entry in sets.items()
    }


def shrink(table: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Convert one entry for each compiler to the file's format, sorted."""
    shrunk = {}
    for march, entry in sorted(table.items()):
        groups: dict[str, list[str]] = {}
        for compiler in sorted(entry, key=by_major):
            groups.setdefault(entry[compiler], []).append(compiler)
        if groups:
            shrunk[march] = {" ".join(names): flags for flags, names in groups.items()}
    return shrunk


if __name__ == "__main__":
    main()
