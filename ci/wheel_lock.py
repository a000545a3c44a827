"""Writes the lock of a recipe: each package that it needs, with the hash of the wheel to install.

    .venv/bin/python ci/wheel_lock.py --python 3.13 --as-of 2026-03-20 'tensorflow[and-cuda]==2.21.0' > LOCK

The wheels are for Linux on x86-64, or on another `--machine`, with the given Python, not for this machine.
Those for aarch64 may need the C library of Debian 13, as some of NVIDIA's do. Packages have their newest
release of the given date; further requirements limit them, such as 'protobuf<7'. With `--on LOCK`, the
packages of another lock count as installed, and are left out if their versions suffice.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PIN = re.compile(r"(?m)^([\w.-]+)==([^\s;]+)")
GLIBC = 41  # minor version of Debian 13's
PLATFORMS = {
    machine: (
        *(f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC, oldest - 1, -1)),
        *(f"{name}_{machine}" for name in (*former, "linux")),
    )
    for machine, oldest, former in (
        ("x86_64", 5, ("manylinux2014", "manylinux2010", "manylinux1")),
        ("aarch64", 17, ("manylinux2014",)),
    )
}
UV_PLATFORMS = {"x86_64": "x86_64-manylinux_2_28", "aarch64": "aarch64-manylinux_2_40"}


def main() -> None:
    """Print the lock."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, metavar="VERSION")
    parser.add_argument("--machine", default="x86_64", choices=UV_PLATFORMS)
    parser.add_argument("--as-of", required=True, metavar="DATE")
    parser.add_argument("--on", type=Path, metavar="LOCK")
    parser.add_argument("requirements", nargs="+", metavar="REQUIREMENT")
    options = parser.parse_args()
    there = dict(PIN.findall(options.on.read_text())) if options.on else {}
    with tempfile.TemporaryDirectory() as name:
        pins = _pins(Path(name), options, there)
        hashes = _hashes(Path(name), options.python, options.machine, pins)
    words = " ".join(f"'{word}'" if re.search(r"[<>\[]", word) else word for word in sys.argv[1:])
    print(f"# ci/wheel_lock.py {words}")
    for package, version in pins.items():
        print(f"{package}=={version} --hash=sha256:{hashes[package]}")


def _pins(folder: Path, options: argparse.Namespace, there: dict[str, str]) -> dict[str, str]:
    """Return version by package of all needed packages, except those that are `there` in this version."""
    (folder / "in.txt").write_text("\n".join(options.requirements))
    words = ["-q", "--no-config", "--no-header", "--no-annotate", "--only-binary=:all:"]
    words += [f"--python-version={options.python}", f"--python-platform={UV_PLATFORMS[options.machine]}"]
    words += [f"--exclude-newer={options.as_of}"]
    # Versions that are there are preferred, not required: a new package may need another version.
    output = folder / "out.txt"
    output.write_text("".join(f"{package}=={version}\n" for package, version in there.items()))
    words += [f"--output-file={output}", *(f"--exclude-newer-package={one}=2100-01-01" for one in there)]
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "compile", *words, str(folder / "in.txt")]
    subprocess.run(uv, check=True)
    needed = PIN.findall(output.read_text())
    return {package: version for package, version in needed if there.get(package) != version}


def _hashes(folder: Path, python: str, machine: str, pins: dict[str, str]) -> dict[str, str]:
    """Return SHA-256 by package of the wheels that pip would install."""
    (folder / "pins.txt").write_text("\n".join(f"{package}=={version}" for package, version in pins.items()))
    words = ["-q", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--report=-"]
    words += [f"--target={folder / 'none'}", "--implementation=cp", f"--python-version={python}"]
    words += [f"--platform={platform}" for platform in PLATFORMS[machine]]
    pip = [sys.executable, "-m", "pip", "install", *words, "-r", str(folder / "pins.txt")]
    report = json.loads(subprocess.run(pip, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return {
        re.sub(r"[._-]+", "-", one["metadata"]["name"]).lower(): one["download_info"]["archive_info"][
            "hashes"
        ]["sha256"]
        for one in report["install"]
    }


if __name__ == "__main__":
    main()
