"""`imagematrix ls`: the variants that the engine or a registry holds."""

from __future__ import annotations

from typing import Annotated

import typer

from imagematrix.cli.options import Json
from imagematrix.cli.output import answer, table
from imagematrix.errors import UnknownImageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.catalog.catalog import Variant

__all__ = ["command"]

MEGABYTE = 1_000_000


def command(
    image: Annotated[str | None, typer.Argument(metavar="[IMAGE[:VERSION]]")] = None, json: Json = False
) -> None:
    """List the variants that the engine holds, of all images or of one; or a registry's of IMAGE:VERSION."""
    from imagematrix.catalog.catalog import split
    from imagematrix.catalog.engine import catalogs
    from imagematrix.cli.choosing import catalog_of

    name, version = split(image) if image else (None, None)
    if image and version and "/" in image:
        found = [catalog_of(image, None)]
    else:
        found = [item for item in catalogs(name) if version in (None, item.version)]
    if image and not found:
        raise UnknownImageError(f"the engine has no variant of {image}", remedy="see `imagematrix ls`")
    if json:
        # Of one version it is the Catalog document itself, as `--catalog` reads it.
        documents = [item.to_json() for item in found]
        answer(documents[0] if version else documents)
        return
    table(
        ("reference", "cuda", "driver", "cubins", "march", "size"),
        [_row(variant) for item in found for variant in item.variants],
    )


def _row(variant: Variant) -> tuple[str, ...]:
    from rich.markup import escape

    driver = variant.driver
    return (
        escape(variant.reference),
        variant.cuda or "-",
        "-" if driver is None else escape(driver.version or driver.mode),
        ", ".join(f"sm_{cubin}" for cubin in variant.cubins) or "-",
        escape(variant.march or "-"),
        f"{variant.size / MEGABYTE:.0f} MB" if variant.size is not None else "?",
    )
