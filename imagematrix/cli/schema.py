"""`imagematrix schema`: the JSON Schemas of matrix.yaml and of all documents."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated

import typer

from imagematrix.common.suggestions import require_known


def command(
    kind: Annotated[
        str | None,
        typer.Argument(metavar="KIND", help="Such as matrix, host or catalog; without it, all names."),
    ] = None,
) -> None:
    """Print the JSON Schema of matrix.yaml, for editors, or of a document; or the names of all of them."""
    schemas = files("imagematrix") / "schemas"  # which may be in the file of `make zipapp`
    names = sorted(path.name.removesuffix(".json") for path in schemas.iterdir())
    if kind is None:
        print("\n".join(names))
        return
    require_known(kind, names, "schema")
    print((schemas / f"{kind}.json").read_text(encoding="utf-8"), end="")
