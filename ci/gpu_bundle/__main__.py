"""Build the bundle that checks imagematrix on a machine with an NVIDIA GPU and little else.

    python ci/gpu_bundle ARCHIVE.tar.gz    the complete bundle as an archive; fails if a part cannot be built
    python ci/gpu_bundle --here FOLDER     a bundle for this machine; parts that cannot be built are left out

The bundle has the folder `checks`, the package as one file, the training program with its libraries and
kernels, and runc. `gpu-bundle/check` runs the checks.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import parts

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NAME = "gpu-bundle"
LIMIT_MIB = 60


def main() -> None:
    """Build the archive or the folder."""
    parser = argparse.ArgumentParser(description="Build the checks for a machine with an NVIDIA GPU.")
    parser.add_argument("--here", action="store_true", help="for this machine, with the parts it can build")
    parser.add_argument("target", type=Path)
    asked = parser.parse_args()
    if asked.here:
        shutil.rmtree(asked.target, ignore_errors=True)
        lacking = _make(asked.target, has_runtime=bool(shutil.which("runc") or shutil.which("crun")))
        for part, why in lacking.items():
            print(f"ci/gpu_bundle: no {part}: {why}", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, NAME)
        lacking = _make(folder, has_runtime=False)
        if lacking:
            sys.exit("\n".join(f"ci/gpu_bundle: no {part}: {why}" for part, why in lacking.items()))
        size = _pack(folder, asked.target)
    print(f"{asked.target}: {size:.1f} MiB", file=sys.stderr)
    if size > LIMIT_MIB:
        sys.exit(f"ci/gpu_bundle: the archive is larger than {LIMIT_MIB} MiB")


def _make(folder: Path, *, has_runtime: bool) -> dict[str, str]:
    """Fill the folder; return the missing parts with the reasons."""
    folder.mkdir(parents=True)
    cache = ROOT / ".cache/gpu"
    cache.mkdir(parents=True, exist_ok=True)
    shutil.copytree(HERE / "checks", folder / "checks", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "check").write_bytes((HERE / "check").read_bytes())
    (folder / "check").chmod(0o755)
    words = [sys.executable, str(ROOT / "ci/make_zipapp.py"), str(folder / "imagematrix.pyz")]
    if code := subprocess.run(words, check=False).returncode:
        sys.exit(code)
    makers: dict[str, Callable[[], object]] = {
        "program": lambda: parts.program(folder / "rootfs"),
        "kernels": lambda: parts.kernels(folder, cache),
        "runc": lambda: None if has_runtime else parts.runtime(folder, cache),
    }
    lacking, made = {}, {}
    for part, make in makers.items():
        try:
            made[part] = make()
        except parts.LackingError as error:
            lacking[part] = str(error)
    about = {
        "made": dt.datetime.now(dt.UTC).date().isoformat(),
        "commit": _commit(),
        "kernels": made.get("kernels"),
        "lacking": lacking,
    }
    (folder / "about.json").write_text(json.dumps(about, indent=2) + "\n")
    return lacking


def _commit() -> str | None:
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def _pack(folder: Path, target: Path) -> float:
    """Write the archive; return its size in MiB."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        return member

    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:gz") as tar:
        tar.add(folder, NAME, filter=plain)
    return target.stat().st_size / 2**20


main()
