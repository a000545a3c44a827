"""The options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["AllowCpu", "CatalogName", "File", "Gpus", "HostFile", "Json", "NvidiaSmi", "Only", "Root"]

File = Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="The matrix.")]
Only = Annotated[
    str | None,
    typer.Option("--only", metavar="EXPR", help="Only these cells, such as 'cuda=12.4,march=znver*'."),
]
Json = Annotated[bool, typer.Option("--json", help="Answer as JSON.")]
HostFile = Annotated[
    Path | None,
    typer.Option("--host", metavar="FILE", help="Decide for the host saved in FILE by `probe --json`."),
]
Root = Annotated[
    Path | None, typer.Option("--root", metavar="DIR", help="Read the captured tree DIR instead of /.")
]
NvidiaSmi = Annotated[
    Path | None,
    typer.Option("--nvidia-smi", metavar="XML", help="Take GPUs and driver from an `nvidia-smi -q -x` dump."),
]
CatalogName = Annotated[
    str | None,
    typer.Option(
        "--catalog",
        metavar="FILE|REF",
        help="Choose from a saved catalog or a registry's image index, not from the engine's images.",
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option("--gpus", metavar="SPEC", help="all, none, a number, indices (0,2) or UUIDs."),
]
AllowCpu = Annotated[
    bool, typer.Option("--allow-cpu", help="Where no GPU variant fits, a CPU-only one will do.")
]
