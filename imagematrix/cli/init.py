"""`imagematrix init`: a matrix and templates to start from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.output import say
from imagematrix.errors import UsageError

__all__ = ["command"]

STARTER = Path(__file__).parent.parent / "starter"


def command(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to write them.")] = Path(),
) -> None:
    """Write a commented matrix.yaml and the templates it uses to start from; overwrites nothing."""
    for name in ("matrix.yaml", "templates"):
        if (folder / name).exists():
            raise UsageError(f"{folder / name} is there already", remedy="name an empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(STARTER / "templates", folder / "templates")
        shutil.copyfile(STARTER / "matrix.yaml", folder / "matrix.yaml")
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    say(f"wrote {folder / 'matrix.yaml'} and {folder / 'templates'}")
    say("next: `imagematrix plan`, then `imagematrix build`")
