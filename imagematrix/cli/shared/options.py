"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.shared import completion

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

Image = Annotated[
    str,
    typer.Argument(
        metavar="IMAGE[:VERSION]",
        help="The image, from the registry in its name, or from the engine if it names none.",
        autocompletion=completion.complete_images,
    ),
]
File = Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="Read the matrix from FILE.")]
Only = Annotated[
    str | None,
    typer.Option(
        "--only",
        metavar="EXPR",
        help="Select these cells only, such as 'cuda>=12.4,march=znver*'.",
        autocompletion=completion.complete_only,
    ),
]
Platforms = Annotated[
    list[str] | None,
    typer.Option(
        "--platform",
        metavar="OS/ARCH[,...]",
        help="Select the cells for these platforms only, such as linux/arm64; repeatable.",
    ),
]
Builders = Annotated[
    list[str] | None,
    typer.Option(
        "--builder",
        metavar="NAME[=JOBS]",
        help="Build on this builder of buildx, JOBS at a time; repeatable.",
    ),
]
ForHosts = Annotated[
    list[Path] | None,
    typer.Option(
        "--for",
        metavar="HOSTS",
        help="Keep to the cells that these saved hosts would choose: files, folders, .ndjson, or - for "
        "stdin; repeatable.",
    ),
]
GangHosts = Annotated[
    list[Path] | None,
    typer.Option(
        "--gang",
        metavar="HOSTS",
        help="Choose one variant for all of these saved hosts: files, folders, .ndjson, or - for stdin; "
        "repeatable.",
    ),
]
Alike = Annotated[
    str | None,
    typer.Option(
        "--alike",
        metavar="NAMES",
        help="With --gang: let hosts get different variants with the same versions of these libraries, such "
        "as cuda,nccl,mpi,torch.",
    ),
]
AnswerFormat = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="{text|classad}",
        help="text: the reference; classad: an attribute of the machine's ClassAd, for HTCondor.",
        autocompletion=lambda: ["text", "classad"],
    ),
]
AtMost = Annotated[
    int | None,
    typer.Option(
        "--at-most",
        min=1,
        metavar="N",
        help="Keep to the N variants of an image that serve the most hosts, and then lose least.",
    ),
]
ShardOf = Annotated[
    str | None,
    typer.Option("--shard", metavar="I/N", help="Select part I of N only; other jobs do the other parts."),
]
DurationsFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--durations",
        metavar="FILE",
        help="Balance the shards by the durations in a `build --json` or `report --json`; repeatable.",
    ),
]
BuildArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--build-arg", metavar="NAME=VALUE", help="Set a build argument declared in the matrix; repeatable."
    ),
]
Proxy = Annotated[
    bool,
    typer.Option("--proxy", help="Pass the proxy variables to builds; only their names are build inputs."),
]
AllowContext = Annotated[
    list[Path] | None,
    typer.Option(
        "--allow-context",
        metavar="DIR",
        help="Allow contexts in DIR, which is not in the matrix's folder; repeatable.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Health = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS:PORT",
        help="Answer /healthz and /readyz on this address, however busy the service is.",
    ),
]
HostFile = Annotated[
    Path | None,
    typer.Option(
        "--host", metavar="FILE", help="Use the host saved in FILE by `probe --json`, not this node."
    ),
]
Root = Annotated[
    Path | None,
    typer.Option("--root", metavar="DIR", help="Read the files of a node that were captured in DIR, not /."),
]
NvidiaSmi = Annotated[
    Path | None,
    typer.Option("--nvidia-smi", metavar="XML", help="Read GPUs and driver from an `nvidia-smi -q -x` dump."),
]
CatalogName = Annotated[
    str | None,
    typer.Option(
        "--catalog",
        metavar="FILE|REF",
        help="Use a saved catalog, a registry's image index, an OCI layout (oci:FOLDER) or an archive "
        "(FILE.tar) instead of the engine's images.",
    ),
]
Policy = Annotated[
    Path | None,
    typer.Option("--policy", metavar="FILE", help="Use only images with the signatures that FILE requires."),
]
ImageName = Annotated[
    str | None,
    typer.Option(
        "--image",
        metavar="IMAGE[:VERSION]",
        help="Use the catalog of this image, if no --catalog is given.",
        autocompletion=completion.complete_images,
    ),
]
Drivers = Annotated[
    list[str] | None,
    typer.Option("--driver", metavar="OLD=NEW", help="Show what a driver upgrade would change; repeatable."),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        metavar="SPEC",
        help="Pass these GPUs: all, none, a number, indices (0,2), UUIDs or conditions (2,memory>=40G); "
        "default: all, or those that the environment names.",
    ),
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="EXPR",
        help="Consider only variants that match, such as 'python=3.13' or 'cuda>=12.4,march=znver*'; "
        "repeatable.",
        autocompletion=completion.complete_where,
    ),
]
ToStore = Annotated[
    str | None,
    typer.Option("--to", metavar="STORE", help="Bring the image into this folder, which needs no engine."),
]
Unpacked = Annotated[
    bool, typer.Option("--unpacked", help="In a store: keep its files in a folder, not in one squashfs.")
]
MaxSize = Annotated[
    str | None,
    typer.Option(
        "--max-size",
        metavar="AMOUNT",
        help="In a store: remove the images started least recently while the store has more, such as 200G.",
    ),
]
Spread = Annotated[
    str | None,
    typer.Option(
        "--spread",
        metavar="SECONDS",
        help="If the image is not there yet, wait first, at random up to so long: for many nodes at once.",
    ),
]
NoWarm = Annotated[bool, typer.Option("--no-warm", help="Choose the variant itself, not a warm image of it.")]
AllowCpu = Annotated[bool, typer.Option("--allow-cpu", help="If no GPU variant fits, accept a CPU-only one.")]
Keep = Annotated[
    int | None, typer.Option("--keep", metavar="N", min=1, help="Keep the newest N versions of an image.")
]
Protect = Annotated[
    list[str] | None, typer.Option("--protect", metavar="VERSION", help="Keep this version; repeatable.")
]
KeptFor = Annotated[
    list[Path] | None,
    typer.Option(
        "--hosts",
        metavar="HOSTS",
        help="Keep the newest version that serves each of these hosts: files, folders, .ndjson, or - for "
        "stdin; repeatable.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Remove what is shown, instead of only showing it.")]


def resolve_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with the options of this module in place of annotations that only name them.

    A command that is also called without typer names them, because it does not load this module.
    """
    command.__annotations__ |= {
        parameter: globals()[name]
        for parameter, name in command.__annotations__.items()
        if name in globals() and name not in command.__globals__
    }
    return command


def list_typed_options(context: typer.Context) -> dict[str, str]:
    """Return the parameters on the command line, by name, each as an option is written."""
    sources = {option: context.get_parameter_source(option.name or "") for option in context.command.params}
    return {
        option.name or "": option.opts[0]
        for option, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    }
