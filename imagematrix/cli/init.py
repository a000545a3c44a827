"""`imagematrix init`: a matrix and templates to start from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.output import info
from imagematrix.errors import UsageError
from imagematrix.spelling import nearest

__all__ = ["command"]

STARTER = Path(__file__).parent.parent / "starter"
TEMPLATES = ("training", "llama.cpp", "pytorch", "pytorch-source", "tensorflow", "vllm", "spark", "cpu")
BASES = {"vllm": ("pytorch",)}  # templates of the images that a template's image is built on
MACROS = ("macros.j2", "cuda_wheels.j2")


def command(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to write them.")] = Path(),
    template: Annotated[
        str, typer.Option("--template", "-t", metavar="NAME", help=f"The template: {', '.join(TEMPLATES)}.")
    ] = TEMPLATES[0],
) -> None:
    """Write a commented matrix.yaml and its templates as a start; existing files are not overwritten."""
    if template not in TEMPLATES:
        remedy = nearest(template, TEMPLATES) or f"one of {', '.join(TEMPLATES)}"
        raise UsageError(f"template {template!r} not found", remedy=remedy)
    if not STARTER.is_dir():  # in the file of `make zipapp`
        raise UsageError(
            "this is the file for nodes, which has no templates",
            remedy="install the whole package: pip install imagematrix",
        )
    try:
        for name in ("matrix.yaml", "templates"):
            if (folder / name).exists():
                raise UsageError(f"{folder / name} already exists", remedy="choose an empty folder")
        for name in (template, *BASES.get(template, ())):
            shutil.copytree(STARTER / "templates" / name, folder / "templates" / name)
        for name in MACROS:
            shutil.copyfile(STARTER / "templates" / name, folder / "templates" / name)
        shutil.copyfile(STARTER / f"{template}.yaml", folder / "matrix.yaml")
    except shutil.Error as error:  # a list with source, target and reason of each file
        (_, target, reason), *_ = error.args[0]
        raise UsageError(f"{target}: {reason}") from error
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    info(f"wrote {folder / 'matrix.yaml'} and {folder / 'templates'}")
    info("next: `imagematrix plan`, then `imagematrix build`")
