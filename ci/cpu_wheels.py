"""What `adopt` and `select` say about the CPU needs of official wheels, beside what these do on such CPUs.

    .venv/bin/python ci/cpu_wheels.py [--python PYTHON] [NAME…]

Each wheel of cpu_wheels.toml is downloaded by its hash and adopted as the only content of an image. Its code
runs under QEMU, in an environment with what pip installs besides. An answer is wrong if an image that fits
ends with SIGILL, or if one is refused that runs. The exit code is 1 if there is a wrong one without a reason.
Each wheel writes its row of the table in PAGE. PYTHON is an interpreter of Python 3.12, for which the wheels
are; those for arm64 have the Python of `ci/arm64`. All of them take hours, and 3 GB of disk.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import frameworks

sys.path.append(str(frameworks.ROOT / "tests/doubles"))  # behind this folder

from emulating import ARM_PYTHON, arm_flags, fetch_arm64, on_arm

import imagematrix as im
from imagematrix.common.record import replace
from imagematrix.hardware.vendors import marches
from imagematrix.selection.rules import cpu
from imagematrix.selection.selection_target import Target

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WHEELS = Path(__file__).with_suffix(".toml")
PAGE = frameworks.ROOT / "docs/reference/cpu-wheels.md"
MARKED = r"(?<=<!-- wheels: {} -->\n).*?(?=<!-- end -->)"
# QEMU's models by machine.
MODELS = {
    "x86_64": ("Nehalem", "SandyBridge", "Haswell"),
    "aarch64": ("cortex-a72", "neoverse-n1", "neoverse-v1"),
}
ARM_PYTHON_RELEASE = "3.13"
FITS, REFUSED = "fits", "refused"
RUNS, SIGILL, REFUSES = "runs", "SIGILL", "refuses itself"
LIMIT = 1800  # seconds of a program under QEMU
SHOWN = 300  # characters of what a program that fails says


def main() -> int:
    """Compare the wheels, all of them or those of these names; return 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="python3.12", help="an interpreter of Python 3.12")
    parser.add_argument("--machine", choices=MODELS, help="of the wheels; without it, both")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    python, machines = shutil.which(options.python), [options.machine] if options.machine else list(MODELS)
    if "x86_64" in machines and (python is None or shutil.which("qemu-x86_64") is None):
        parser.error(f"needs {options.python} and qemu-user: install them, or name a Python with --python")
    if "aarch64" in machines:
        fetch_arm64()
    right = True
    for wheel in wheels():
        machine = wheel["machine"]
        if machine not in machines or (options.names and wheel["name"].split()[0] not in options.names):
            continue
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            variant, answers, outcomes = _tried(Path(folder), python or "", wheel)
        wrong = judged(answers, outcomes)
        right &= not wrong or "why" in wheel
        seconds = time.monotonic() - started
        flags = " ".join(sorted(variant.cpu_flags)) or "none"
        print(f"{wheel['name']} for {machine}: {flags} ({seconds:.0f} s)", flush=True)
        for model in answers:
            print(f"  {model}: {answers[model]}, {outcomes[model]}{', wrong' * (model in wrong)}", flush=True)
        date = time.strftime("%Y-%m-%d", time.gmtime())
        _write(machine, wheel["name"], row(wheel, variant, answers, outcomes, date))
    return 0 if right else 1


def wheels() -> list[dict[str, Any]]:
    """Return the wheels of cpu_wheels.toml, each with its machine."""
    return [
        {"machine": machine, **wheel}
        for machine, listed in tomllib.loads(WHEELS.read_text()).items()
        for wheel in listed
    ]


def judged(answers: Mapping[str, str], outcomes: Mapping[str, str]) -> list[str]:
    """Return the CPUs on which an answer is wrong. A program that refuses a CPU proves nothing."""
    wrong = {(FITS, SIGILL), (REFUSED, RUNS)}
    return [model for model in answers if (answers[model], outcomes[model]) in wrong]


def row(
    wheel: Mapping[str, Any],
    variant: im.Variant,
    answers: Mapping[str, str],
    outcomes: Mapping[str, str],
    date: str,
) -> list[str]:
    """Return the cells of a wheel in the table."""
    wrong = judged(answers, outcomes)
    cells = [f"{answers[model]}, {outcomes[model]}" for model in answers]
    marked = [f"**{cell}**" if model in wrong else cell for model, cell in zip(answers, cells, strict=True)]
    flags = " ".join(sorted(variant.cpu_flags)) or "none"
    return [wheel["name"], flags, variant.source("cpu_flags"), *marked, wheel.get("why", ""), date]


def _tried(
    folder: Path, python: str, wheel: Mapping[str, Any]
) -> tuple[im.Variant, dict[str, str], dict[str, str]]:
    """Return the variant of a wheel, and by CPU what `select` says of it and what its code does."""
    machine = wheel["machine"]
    release = () if machine == "x86_64" else (machine, ARM_PYTHON_RELEASE)
    downloaded = frameworks.downloaded(folder / "wheels", wheel["wheels"], *release)
    environment = folder / "environment"
    needed: list[str | Path] = [*downloaded, *wheel.get("needs", ())]
    if machine == "x86_64":
        subprocess.run([python, "-m", "venv", environment], check=True)
        _install(environment / "bin/python", needed)
    else:
        # pip would judge the conditions of requirements by this machine.
        uv = (Path(sys.executable).with_name("uv"), "pip", "install", "-q", "--only-binary", ":all:")
        options = ("--python-platform", f"{machine}-manylinux_2_40", "--python-version", ARM_PYTHON_RELEASE)
        subprocess.run([*uv, "--target", environment, *options, *needed], check=True)
    catalog = frameworks.adopted(folder, downloaded, frameworks.ARCHITECTURES[machine])
    (variant,) = catalog.variants
    answers = {model: _answer(variant, machine, model) for model in MODELS[machine]}
    outcomes = {model: _outcome(environment, machine, model, wheel["runs"]) for model in MODELS[machine]}
    return variant, answers, outcomes


def _install(python: str | Path, words: Sequence[str | Path]) -> None:
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *words], check=True)


def _answer(variant: im.Variant, machine: str, model: str) -> str:
    """Return what the rule `cpu` says of such a CPU; some wheels also have device code."""
    if machine == "x86_64":
        flags = marches.get_required_flags(model.lower(), "gcc-14") or frozenset()
    else:
        flags = arm_flags(model)
    host = im.Host.load(frameworks.HOSTS[machine])
    target = Target(host=replace(host, cpu=replace(host.cpu, flags=flags)), gpus=())
    return FITS if cpu.RULE.is_satisfied(target, variant) else REFUSED


def _outcome(environment: Path, machine: str, model: str, code: str) -> str:
    """Return what Python code does on such a CPU, with the packages of an environment."""
    if machine == "x86_64":
        start: list[str | Path] = ["qemu-x86_64", "-cpu", model, environment / "bin/python"]
    else:
        start = on_arm(model, ["-E", f"PYTHONPATH={environment}", ARM_PYTHON])
    command = [*start, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode == 0:
        return RUNS
    if done.returncode in (-signal.SIGILL, 128 + signal.SIGILL):
        return SIGILL
    print(f"  {model}: {done.stderr.strip()[-SHOWN:]}", file=sys.stderr)
    return REFUSES


def _write(machine: str, name: str, cells: Sequence[str]) -> None:
    """Write the row of a wheel into the page; the rows are in the order of cpu_wheels.toml."""
    page, marked = PAGE.read_text(), re.compile(MARKED.format(machine), re.DOTALL)
    lines = dict(re.findall(r"^(\| (.*?) \|.*\n)", (marked.search(page) or [""])[0], re.MULTILINE))
    rows = {title: line for line, title in lines.items()} | {name: f"| {' | '.join(cells)} |\n"}
    head = ["Wheel", "Flags", "Source", *MODELS[machine], "Difference", "Date"]
    table = f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n"
    names = (wheel["name"] for wheel in wheels() if wheel["machine"] == machine)
    table += "".join(rows[title] for title in names if title in rows)
    PAGE.write_text(marked.sub(lambda _: f"\n{table}\n", page))


if __name__ == "__main__":
    sys.exit(main())
