"""Programs and libraries compiled with the local compiler, and an audit's findings in their instructions."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from imagematrix.audit import elf
from imagematrix.audit.cpu import scan
from imagematrix.audit.window import Window

if TYPE_CHECKING:
    from pathlib import Path

    from imagematrix.audit.host_code import HostCode

__all__ = ["compiled", "scanned"]


def compiled(target: Path, source: str, *options: str, compiler: str = "gcc") -> Path:
    """Compile C to a program, or with -shared to a library."""
    command: list[str | Path] = [compiler, "-x", "c", "-", "-x", "none", "-o", target, *options]
    subprocess.run(command, input=source, text=True, check=True)
    return target


def scanned(path: Path, name: str | None = None) -> HostCode:
    """Return what the code of a file at the path `name` of an image needs."""
    with path.open("rb") as file:
        window = Window(file, 0, path.stat().st_size)
        headers = elf.read(window)
        assert headers is not None
        assert scan.decodable(headers, window)
        return scan.scan(name or f"/opt/{path.name}", headers, window)
