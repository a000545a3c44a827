"""NVIDIA's cuobjdump, which judges what is read and left of device code, and wheels for it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["cuobjdump", "downloaded"]

WHEEL = "nvidia-cuda-cuobjdump==13.5.37"


def cuobjdump(folder: Path) -> Path:
    """Return the program, which is put into a folder."""
    with zipfile.ZipFile(downloaded(folder / "cuobjdump", WHEEL)) as archive:
        program = folder / archive.extract("nvidia/cu13/bin/cuobjdump", folder)
    program.chmod(0o755)
    return program


def downloaded(folder: Path, wheel: str) -> Path:
    """Return a wheel, by its requirement, in a folder that has nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "-q", "download", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, "-d", str(folder), wheel], check=True)
    (path,) = folder.glob("*.whl")
    return path
