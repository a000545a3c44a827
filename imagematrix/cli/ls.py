"""`imagematrix ls`: the variants in the engine or in a registry."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from imagematrix.cli.completing import images
from imagematrix.cli.options import CatalogName, Json, Where
from imagematrix.cli.output import counted, print_json, print_text, table
from imagematrix.errors import UsageError
from imagematrix.facts.versions import natural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.catalog.catalog import Catalog, Variant
    from imagematrix.selection import question
    from imagematrix.stores.sizes import Sizes

__all__ = ["command"]

MEGABYTE = 1_000_000


def command(
    image: Annotated[str | None, typer.Argument(metavar="[IMAGE[:VERSION]]", autocompletion=images)] = None,
    catalog: CatalogName = None,
    where: Where = None,
    size: Annotated[
        bool,
        typer.Option("--size", help="Show the size that each variant adds to the others, and the total."),
    ] = False,
    json: Json = False,
) -> None:
    """List the variants of all images or of one image in the engine, or of IMAGE:VERSION in a registry.

    For an image in a registry without a version, list the versions.
    """
    from imagematrix.catalog.sources import list_catalogs
    from imagematrix.cli.choosing import catalog_of
    from imagematrix.reference import names_registry, split
    from imagematrix.selection.question import parse

    name, version = split(image) if image else (None, None)
    one = version is not None or catalog is not None
    versions = name is not None and not one and names_registry(name)
    catalogs = [catalog_of(image, catalog)] if one else list_catalogs(name)
    catalogs = _narrowed(catalogs, parse(where or ()))
    if size:
        from imagematrix.stores.sizes import sizes

        weighed = [sizes(each) for each in catalogs]
        if json:
            listed = [each.to_json() for each in weighed]
            print_json(listed[0] if one else listed)
        else:
            for each in weighed:
                _weights(each)
    elif json:
        # For one version it is the Catalog document itself, as `--catalog` reads it.
        documents = [each.to_json() for each in catalogs]
        print_json(documents[0] if one else documents)
    elif versions:
        table(("version", "variants", "platforms", "axes"), map(_version, catalogs))
    else:
        variants = [variant for each in catalogs for variant in each.variants]
        axes = sorted({axis for variant in variants for axis, _ in variant.axes})
        rows = [_row(variant, axes) for variant in variants]
        table(("reference", "cuda", "driver", "cubins", "march", *axes, "size"), rows)


def _weights(weights: Sizes) -> None:
    """Print a table of the sizes of a version's variants, and their total."""
    pull = any(one.pull is not None for one in weights.variants)
    rows = [
        (
            escape(one.variant.reference),
            _amount(one.size),
            _amount(adds),
            *([_amount(one.pull)] if pull else []),
        )
        for one, adds in zip(weights.variants, weights.added(), strict=True)
    ]
    table(("reference", "size", "adds", *(["to pull"] if pull else [])), rows)
    kinds = {one.compressed for one in weights.variants}
    kind = "compressed" if kinds == {True} else "uncompressed" if kinds == {False} else "partly compressed"
    name = f"{weights.catalog.image}:{weights.catalog.version}"
    layers = counted(len(weights.layers), "layer")
    print_text(f"\n{name}: {_amount(weights.total)} {kind} in {layers}, each counted once")


def _amount(size: int | None) -> str:
    return f"{size / MEGABYTE:.1f} MB" if size is not None else "?"


def _narrowed(catalogs: Sequence[Catalog], where: question.Where) -> list[Catalog]:
    """Return the catalogs narrowed to `where`; raise UsageError if it is invalid for all of them."""
    from imagematrix.selection.question import narrowed

    valid, errors = [], []
    for catalog in catalogs:
        try:
            valid.append(narrowed(catalog, where))
        except UsageError as error:
            errors.append(error)
    if errors and not valid:
        raise errors[0]
    return valid


def _version(catalog: Catalog) -> tuple[str, ...]:
    """Return the row of a version: number of variants, platforms, and the image's own axes."""
    platforms = sorted({variant.platform for variant in catalog.variants})
    values: dict[str, set[str]] = {}
    for variant in catalog.variants:
        for axis, value in variant.axes:
            values.setdefault(axis, set()).add(value)
    axes = [f"{axis} {'|'.join(sorted(of_axis, key=natural))}" for axis, of_axis in sorted(values.items())]
    name = f"{catalog.image}:{catalog.version}"
    return escape(name), str(len(catalog.variants)), escape(", ".join(platforms)), ", ".join(axes) or "-"


def _row(variant: Variant, axes: Sequence[str]) -> tuple[str, ...]:
    driver = variant.driver
    return (
        escape(variant.reference),
        variant.cuda or "-",
        "-" if driver is None else escape(driver.version or driver.mode),
        ", ".join(f"sm_{cubin}" for cubin in variant.cubins) or "-",
        escape(variant.march or "-"),
        *(dict(variant.axes).get(axis, "-") for axis in axes),
        f"{variant.size / MEGABYTE:.0f} MB" if variant.size is not None else "?",
    )
