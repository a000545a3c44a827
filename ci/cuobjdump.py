"""Download NVIDIA's cuobjdump, which lists the device code in files, and wheels to compare."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

WHEEL = "nvidia-cuda-cuobjdump==13.5.37"


def cuobjdump(folder: Path) -> Path:
    """Download the program into a folder and return its path."""
    with zipfile.ZipFile(downloaded(folder / "cuobjdump", WHEEL)) as archive:
        program = folder / archive.extract("nvidia/cu13/bin/cuobjdump", folder)
    program.chmod(0o755)
    return program


def downloaded(folder: Path, wheel: str) -> Path:
    """Download the wheel of a requirement into a folder, which is emptied first, and return its path."""
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "-q", "download", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, "-d", str(folder), wheel], check=True)
    (path,) = folder.glob("*.whl")
    return path
