"""`imagematrix ls`: the variants in the engine or in a registry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.shared.completion import complete_images
from imagematrix.cli.shared.options import CatalogName, Json, Policy, Where
from imagematrix.cli.shared.output import escape_text, print_json, print_table, print_text
from imagematrix.common.text import format_count, quote_word
from imagematrix.common.units import format_megabytes
from imagematrix.errors import UsageError
from imagematrix.hardware.vendors.versions import make_natural_key
from imagematrix.selection.rules.device_code import get_served_targets

EXAMPLE = "imagematrix ls registry.example.com/ml/training:v1 --size"
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.build.stores.sizes import Sizes
    from imagematrix.images.catalog.catalog import Catalog, Variant
    from imagematrix.images.catalog.warm_image import WarmImage
    from imagematrix.selection import query

SCHEMA = "imagematrix.versions/v1"


def command(
    image: Annotated[
        str | None,
        typer.Argument(
            metavar="IMAGE[:VERSION]",
            help="List only this image; without it, all in the engine.",
            autocompletion=complete_images,
        ),
    ] = None,
    catalog: CatalogName = None,
    policy: Policy = None,
    where: Where = None,
    size: Annotated[
        bool,
        typer.Option("--size", help="Show the size that each image adds to the others, and the total."),
    ] = False,
    before: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="OLD",
            help="Add what a node with the version or image OLD still pulls; implies --size.",
        ),
    ] = None,
    package: Annotated[
        str | None,
        typer.Option(
            "--package",
            metavar="GLOB",
            help="Show which variants contain a package, such as openssl or 'libssl*', and its version.",
        ),
    ] = None,
    hosts: Annotated[
        list[Path] | None,
        typer.Option(
            "--hosts",
            metavar="HOSTS",
            help="With --package, show which of these saved hosts get the variants: files, folders, "
            ".ndjson, or - for stdin; repeatable.",
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store", metavar="STORE", help="List what is in this folder, which `pull --to` fills."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List the variants of all images or of one image in the engine, or of IMAGE:VERSION in a registry.

    For an image in a registry without a version, list the versions. With --store, list what is there.
    """
    from imagematrix.cli.shared.inputs import find_catalog
    from imagematrix.common.image_reference import names_registry, split_version
    from imagematrix.images.catalog.sources import list_catalogs, require_not_built_on
    from imagematrix.selection.query import parse_where

    name, version = split_version(image) if image else (None, None)
    single = version is not None or catalog is not None
    if store is not None:
        values = {
            "--catalog": catalog,
            "--policy": policy,
            "--from": before,
            "--package": package,
            "--hosts": hosts,
        }
        options = [option for option, value in values.items() if value] + ["--size"] * size
        _print_store(store, image, options, parse_where(where or ()), json=json, single=single)
        return
    _require_compatible(single=single, sizes=size or before is not None, package=package, hosts=hosts)
    if before is not None and not single:
        raise UsageError("--from compares one version", remedy="name it: IMAGE:VERSION --from OLD")
    shows_versions = name is not None and not single and names_registry(name)
    catalogs = [find_catalog(image, catalog, policy)] if single else list_catalogs(name, policy=policy)
    require_not_built_on(
        name, catalog, (variant.reference for listed in catalogs for variant in listed.variants)
    )
    if package is not None:
        from imagematrix.cli.shared import package_search

        package_search.print_package_variants(
            catalogs[0], package, hosts or (), parse_where(where or ()), json=json
        )
        return
    catalogs = _narrow_catalogs(catalogs, parse_where(where or ()))
    if before is not None:
        _print_upgrade_sizes(catalogs[0], before, policy, json=json)
    elif size:
        from imagematrix.build.stores.sizes import measure_sizes

        sizes = [measure_sizes(listed) for listed in catalogs]
        if json:
            print_json(_make_document(sizes, single=single))
        else:
            for version_sizes in sizes:
                _print_sizes(version_sizes)
    elif json:
        print_json(_make_document(catalogs, single=single))
    elif shows_versions:
        print_table(("version", "variants", "platforms", "axes"), map(_format_version, catalogs))
    else:
        _print_variants(catalogs)


def _print_store(
    path: str, image: str | None, options: Sequence[str], where: query.Where, *, json: bool, single: bool
) -> None:
    """Print the variants that a store has; raise UsageError if there is no such store, or for `options`."""
    from imagematrix.images.catalog.store import list_present
    from imagematrix.images.local_store.folder import ImageStore

    if options:
        raise UsageError(f"--store lists what is in a folder, so {options[0]} has no effect")
    store = ImageStore(path)
    if not Path(store.path).is_dir():
        raise UsageError(
            f"there is no store {store}", remedy=f"run `imagematrix pull IMAGE --to {quote_word(store)}`"
        )
    catalogs = _narrow_catalogs(list_present(store, image), where)
    if json:
        print_json(_make_document(catalogs, single=single))
    else:
        _print_variants(catalogs)


def _require_compatible(
    *, single: bool, sizes: bool, package: str | None, hosts: Sequence[Path] | None
) -> None:
    """Raise UsageError if options cannot be combined."""
    if package is None and hosts:
        raise UsageError("--hosts says who gets a package", remedy="add --package GLOB")
    if package is not None and not single:
        raise UsageError("--package looks into one version", remedy="name it: IMAGE:VERSION --package GLOB")
    if package is not None and sizes:
        raise UsageError("--package has no sizes", remedy="leave out --size and --from")


def _print_variants(catalogs: Sequence[Catalog]) -> None:
    variants = [variant for catalog in catalogs for variant in catalog.variants]
    axes = sorted({axis for variant in variants for axis, _ in variant.axes})
    warm_images = [warm_image for catalog in catalogs for warm_image in catalog.warm]
    rows = []
    for variant in variants:
        driver = variant.driver
        row = (
            escape_text(variant.reference),
            variant.cuda or "-",
            "-" if driver is None else escape_text(driver.version or driver.mode),
            ", ".join(f"sm_{cubin}" for cubin in get_served_targets(variant)) or "-",
            escape_text(variant.march or "-"),
            *(dict(variant.axes).get(axis, "-") for axis in axes),
            format_megabytes(variant.size, 0),
            *([escape_text(_describe_warm_images(variant, warm_images))] if warm_images else []),
        )
        rows.append(row)
    headings = ("reference", "cuda", "driver", "cubins", "march", *axes, "size")
    print_table((*headings, "warm") if warm_images else headings, rows)


def _describe_warm_images(variant: Variant, warm_images: Sequence[WarmImage]) -> str:
    """Return how many warm images a variant has, and the paths of the folders that their caches expect."""
    own = [warm_image for warm_image in warm_images if warm_image.base == variant.digest]
    paths = dict.fromkeys(path for warm_image in own for _, path in warm_image.inputs)
    return ", ".join([str(len(own) or "-"), *paths])


def _make_document(versions: Sequence[Catalog | Sizes], *, single: bool) -> object:
    """Return the document of a single version, as `--catalog` reads it, or that of several."""
    documents = [version.to_json() for version in versions]
    return documents[0] if single else {"schema": SCHEMA, "versions": documents}


def _print_upgrade_sizes(catalog: Catalog, before: str, policy: Path | None, *, json: bool) -> None:
    """Print the sizes of a version with what a node that has the version or image `before` still pulls."""
    from imagematrix.build.publish.predecessor import find_predecessors
    from imagematrix.build.stores.sizes import measure_sizes
    from imagematrix.images.catalog.sources import open_catalog

    is_reference = any(mark in before for mark in ":/@")
    old = open_catalog(before if is_reference else f"{catalog.image}:{before}", policy=policy)
    sizes = measure_sizes(catalog)
    predecessors = find_predecessors(sizes, measure_sizes(old))
    if not json:
        pulls = [format_megabytes(predecessor.pull if predecessor else None) for predecessor in predecessors]
        _print_sizes(sizes, pulls, f"from {before}")
        return
    document = sizes.to_json()
    document["variants"] = [
        {
            **row,
            "from": predecessor.pull if predecessor else None,
            "replaces": predecessor.reference if predecessor else None,
        }
        for row, predecessor in zip(sizes.list_rows(), predecessors, strict=True)
    ]
    print_json(document)


def _print_sizes(sizes: Sizes, upgrade: Sequence[str] = (), heading: str = "") -> None:
    """Print a table of the sizes of a version's images, and their total.

    `upgrade` is one more column, for the variants: a warm image has no predecessor.
    """
    images = sizes.images
    added = (*sizes.compute_added(), *sizes.compute_added_by_warm())
    has_pulls = any(image.pull is not None for image in images)
    rows = [
        (
            escape_text(image.image.reference),
            format_megabytes(image.size),
            format_megabytes(adds),
            *([format_megabytes(image.pull)] if has_pulls else []),
            *((upgrade[row : row + 1] or ["-"]) if upgrade else []),
        )
        for row, (image, adds) in enumerate(zip(images, added, strict=True))
    ]
    headings = [*(["to pull"] if has_pulls else []), *([escape_text(heading)] if upgrade else [])]
    print_table(("reference", "size", "adds", *headings), rows)
    kinds = {image.compressed for image in images}
    kind = "partly compressed"
    if len(kinds) == 1:
        kind = "compressed" if kinds == {True} else "uncompressed"
    name = f"{sizes.catalog.image}:{sizes.catalog.version}"
    layers = format_count(len(sizes.layers), "layer")
    print_text("", f"{name}: {format_megabytes(sizes.total)} {kind} in {layers}, each counted once")


def _narrow_catalogs(catalogs: Sequence[Catalog], where: query.Where) -> list[Catalog]:
    """Return the catalogs narrowed to `where`; raise UsageError if it is invalid for all of them."""
    from imagematrix.selection.query import narrow_catalog

    valid, errors = [], []
    for catalog in catalogs:
        try:
            valid.append(narrow_catalog(catalog, where))
        except UsageError as error:
            errors.append(error)
    if errors and not valid:
        raise errors[0]
    return valid


def _format_version(catalog: Catalog) -> tuple[str, ...]:
    """Return the row of a version: number of variants, platforms, and the image's own axes."""
    platforms = sorted({variant.platform for variant in catalog.variants})
    values: dict[str, set[str]] = {}
    for variant in catalog.variants:
        for axis, value in variant.axes:
            values.setdefault(axis, set()).add(value)
    axes = [
        f"{axis} {'|'.join(sorted(of_axis, key=make_natural_key))}"
        for axis, of_axis in sorted(values.items())
    ]
    name = f"{catalog.image}:{catalog.version}"
    return (
        escape_text(name),
        str(len(catalog.variants)),
        escape_text(", ".join(platforms)),
        ", ".join(axes) or "-",
    )
