"""The options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli import completing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "AllowCpu",
    "BuildArgs",
    "CatalogName",
    "DurationsFiles",
    "File",
    "Gpus",
    "HostFile",
    "Image",
    "Json",
    "NvidiaSmi",
    "Only",
    "Proxy",
    "Root",
    "ShardOf",
    "Where",
    "resolved",
]

Image = Annotated[str, typer.Argument(metavar="IMAGE[:VERSION]", autocompletion=completing.images)]
File = Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="The matrix.")]
Only = Annotated[
    str | None,
    typer.Option(
        "--only",
        metavar="EXPR",
        help="Only these cells, such as 'cuda=12.4,march=znver*'.",
        autocompletion=completing.only,
    ),
]
ShardOf = Annotated[
    str | None,
    typer.Option("--shard", metavar="I/N", help="Only part I of N: the others are for other jobs."),
]
DurationsFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--durations",
        metavar="FILE",
        help="Balance the shards by what an earlier `build --json` or `report --json` recorded; repeatable.",
    ),
]
BuildArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--build-arg", metavar="NAME=VALUE", help="A build argument that the matrix names; repeatable."
    ),
]
Proxy = Annotated[
    bool,
    typer.Option("--proxy", help="Give builds the proxies of the environment, which count by their names."),
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
    typer.Option(
        "--gpus",
        metavar="SPEC",
        help="all, none, a number, indices (0,2), UUIDs or conditions (2,memory>=40G).",
    ),
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="EXPR",
        help="Only variants such as 'python=3.13', in the words of `plan --only`; repeatable.",
        autocompletion=completing.where,
    ),
]
AllowCpu = Annotated[
    bool, typer.Option("--allow-cpu", help="Where no GPU variant fits, a CPU-only one will do.")
]


def resolved(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with the options of this module where it only names them, for typer to read.

    The module of a command that is also called without typer does not load this one.
    """
    command.__annotations__ |= {
        parameter: globals()[name]
        for parameter, name in command.__annotations__.items()
        if name in __all__ and name not in command.__globals__
    }
    return command
