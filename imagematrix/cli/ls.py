"""`imagematrix ls`: the variants that the engine or a registry holds."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from imagematrix.cli.completing import images
from imagematrix.cli.options import Json, Where
from imagematrix.cli.output import answer, table
from imagematrix.errors import UsageError
from imagematrix.facts.versions import natural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.catalog.catalog import Catalog, Variant
    from imagematrix.selection import question

__all__ = ["command"]

MEGABYTE = 1_000_000


def command(
    image: Annotated[str | None, typer.Argument(metavar="[IMAGE[:VERSION]]", autocompletion=images)] = None,
    where: Where = None,
    json: Json = False,
) -> None:
    """List the variants that the engine holds, of all images or of one, or a registry's of IMAGE:VERSION.

    Of an image in a registry without a version, list the versions.
    """
    from imagematrix.catalog.sources import list_catalogs
    from imagematrix.cli.choosing import catalog_of
    from imagematrix.reference import names_registry, split
    from imagematrix.selection.question import parse

    name, version = split(image) if image else (None, None)
    versions = name is not None and version is None and names_registry(name)
    catalogs = [catalog_of(image, None)] if version else list_catalogs(name)
    found = _asked(catalogs, parse(where or ()))
    if json:
        # Of one version it is the Catalog document itself, as `--catalog` reads it.
        documents = [item.to_json() for item in found]
        answer(documents[0] if version else documents)
    elif versions:
        table(("version", "variants", "platforms", "axes"), map(_version, found))
    else:
        variants = [variant for item in found for variant in item.variants]
        own = sorted({axis for variant in variants for axis, _ in variant.axes})
        rows = [_row(variant, own) for variant in variants]
        table(("reference", "cuda", "driver", "cubins", "march", *own, "size"), rows)


def _asked(catalogs: Sequence[Catalog], where: question.Where) -> list[Catalog]:
    """Return what `where` leaves of some catalogs; raise UsageError where it means nothing in any of them."""
    from imagematrix.selection.question import narrowed

    found, errors = [], []
    for catalog in catalogs:
        try:
            found.append(narrowed(catalog, where))
        except UsageError as error:
            errors.append(error)
    if errors and not found:
        raise errors[0]
    return found


def _version(catalog: Catalog) -> tuple[str, ...]:
    """Return the row of a version: how many variants it has, for which platforms, and its own axes."""
    platforms = sorted({variant.platform for variant in catalog.variants})
    own: dict[str, set[str]] = {}
    for variant in catalog.variants:
        for axis, value in variant.axes:
            own.setdefault(axis, set()).add(value)
    axes = [f"{axis} {'|'.join(sorted(these, key=natural))}" for axis, these in sorted(own.items())]
    name = f"{catalog.image}:{catalog.version}"
    return escape(name), str(len(catalog.variants)), escape(", ".join(platforms)), ", ".join(axes) or "-"


def _row(variant: Variant, own: Sequence[str]) -> tuple[str, ...]:
    driver = variant.driver
    return (
        escape(variant.reference),
        variant.cuda or "-",
        "-" if driver is None else escape(driver.version or driver.mode),
        ", ".join(f"sm_{cubin}" for cubin in variant.cubins) or "-",
        escape(variant.march or "-"),
        *(dict(variant.axes).get(axis, "-") for axis in own),
        f"{variant.size / MEGABYTE:.0f} MB" if variant.size is not None else "?",
    )
