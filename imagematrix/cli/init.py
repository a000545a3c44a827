"""`imagematrix init`: a matrix and templates to start from."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.shared.init_from_dockerfile import (
    find_dockerfile,
    print_next_commands,
    refuse_write_errors,
    require_absent,
    write_converted,
)
from imagematrix.cli.shared.output import print_info
from imagematrix.common.suggestions import suggest_nearest
from imagematrix.common.text import format_count, shorten_lines
from imagematrix.errors import UnservedError, UsageError

EXAMPLE = "imagematrix init --template pytorch my-images"
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

STARTER = Path(__file__).parent.parent / "starter"
TEMPLATES = (
    "training",
    "llama.cpp",
    "pytorch",
    "pytorch-arm64",
    "pytorch-source",
    "tensorflow",
    "vllm",
    "vllm-arm64",
    "spark",
    "numba",
    "cpu",
)
# Folders of templates that a matrix uses, unless it is the one of its name.
FOLDERS = {
    "pytorch-arm64": ("pytorch",),
    "vllm": ("vllm", "pytorch"),
    "vllm-arm64": ("vllm", "pytorch"),
}
MACROS = ("macros.j2", "cuda_wheels.j2", "linker_cache.py")


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write to.")] = Path(),
    template: Annotated[
        str | None,
        typer.Option(
            "--template",
            "-t",
            metavar="NAME",
            help=f"The template: {', '.join(TEMPLATES)}. Default: `{TEMPLATES[0]}`.",
        ),
    ] = None,
    hosts: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="HOSTS|DOCKERFILE",
            help="Write a matrix for these saved hosts and your own template: files, folders, .ndjson, or - "
            "for stdin; repeatable. Or take over a Dockerfile: what its ARGs say of CUDA, GPUs and Python "
            "becomes axes.",
        ),
    ] = None,
    drivers: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="With --from: the installers of the drivers, as paths or https addresses with {version} and "
            "{arch}.",
        ),
    ] = None,
    cuda: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RELEASE",
            help="With --from: use this CUDA release; default: the fewest and newest that serve all hosts; "
            "repeatable.",
        ),
    ] = None,
) -> None:
    """Write a commented matrix.yaml and its templates as a start; existing files are not overwritten."""
    if not STARTER.is_dir():  # in the file of `make zipapp`
        from imagematrix.common.zipapp_writer import WHOLE_PACKAGE

        raise UsageError(
            "this is the file for nodes, which has no templates",
            remedy=WHOLE_PACKAGE,
        )
    if hosts:
        if template is not None:
            raise UsageError("--from and --template exclude each other")
        _write_from(hosts, folder, drivers, cuda or ())
        return
    if drivers is not None or cuda:
        raise UsageError("--drivers and --cuda need the hosts of a fleet", remedy="add --from HOSTS")
    chosen = TEMPLATES[0] if template is None else template
    if chosen not in TEMPLATES:
        remedy = suggest_nearest(chosen, TEMPLATES) or f"one of {', '.join(TEMPLATES)}"
        raise UsageError(f"template {chosen!r} not found", remedy=remedy)
    with refuse_write_errors():
        for name in ("matrix.yaml", "templates"):
            require_absent(folder / name)
        for name in FOLDERS.get(chosen, (chosen,)):
            shutil.copytree(STARTER / "templates" / name, folder / "templates" / name)
        for name in MACROS:
            shutil.copyfile(STARTER / "templates" / name, folder / "templates" / name)
        shutil.copyfile(STARTER / f"{chosen}.yaml", folder / "matrix.yaml")
    print_info(f"wrote {folder / 'matrix.yaml'} and {folder / 'templates'}")
    print_next_commands(folder)


def _write_from(sources: Sequence[Path], folder: Path, drivers: str | None, cuda: Sequence[str]) -> None:
    """Write a matrix from hosts, or from a Dockerfile."""
    text = find_dockerfile(sources)
    if text is None:
        _write_fleet_matrix(sources, folder, drivers, cuda)
    elif drivers is not None or cuda:
        raise UsageError("--drivers and --cuda need hosts, not a Dockerfile", remedy="leave them out")
    else:
        write_converted(sources[0], text, folder)


def _write_fleet_matrix(
    hosts: Sequence[Path], folder: Path, drivers: str | None, cuda: Sequence[str]
) -> None:
    """Write a matrix for a fleet, and the files of a template that do not exist yet."""
    from imagematrix.build import proposal
    from imagematrix.build.proposal.cells import propose_cells
    from imagematrix.build.proposal.matrix_text import DRIVERS, TEMPLATE, describe_unserved, format_matrix
    from imagematrix.common import files
    from imagematrix.selection.fleet.hosts import load_hosts

    fleet = load_hosts(*hosts, stream=sys.stdin.buffer)
    cells = propose_cells(fleet, releases=cuda)
    reasons = describe_unserved(cells)
    if not cells.suited:
        raise UnservedError("no cell can serve any of these hosts:", *shorten_lines(reasons, len(reasons)))
    text = format_matrix(cells, drivers=DRIVERS if drivers is None else drivers)
    templates = {f"templates/{name}": STARTER / "templates" / name for name in MACROS}
    templates[f"templates/{TEMPLATE}"] = Path(proposal.__file__).parent / "Dockerfile.j2"
    with refuse_write_errors():
        require_absent(folder / "matrix.yaml")
        for name, source in templates.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if not (folder / name).exists():
                shutil.copyfile(source, folder / name)
        files.write_output(folder / "matrix.yaml", text.encode())
    print_info(
        f"wrote {folder / 'matrix.yaml'}: {format_count(len(cells.points), 'cell')} for {cells.served_count} "
        f"of {format_count(len(fleet), 'host')}"
    )
    for reason in reasons:
        print_info(f"no cell can serve {reason}")
    command = ["imagematrix", "plan", *(("-f", str(folder / "matrix.yaml")) if folder != Path() else ())]
    command += [word for path in hosts for word in ("--for", str(path))]
    print_info(f"next: write {folder / 'templates' / TEMPLATE}, then `{shlex.join(command)}`")
