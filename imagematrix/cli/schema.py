"""`imagematrix schema`: the JSON Schemas of matrix.yaml and of all documents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.errors import UsageError
from imagematrix.spelling import nearest

__all__ = ["command"]

SCHEMAS = Path(__file__).parent.parent / "schemas"


def command(
    kind: Annotated[
        str | None,
        typer.Argument(metavar="[KIND]", help="Such as matrix, host or catalog; without it, all names."),
    ] = None,
) -> None:
    """Print the JSON Schema of matrix.yaml, for editors, or of a document; or the names of all of them."""
    names = sorted(path.stem for path in SCHEMAS.glob("*.json"))
    if kind is None:
        print("\n".join(names))
        return
    if kind not in names:
        remedy = nearest(kind, names) or f"one of {', '.join(names)}"
        raise UsageError(f"invalid schema: {kind!r}", remedy=remedy)
    print((SCHEMAS / f"{kind}.json").read_text(encoding="utf-8"), end="")
