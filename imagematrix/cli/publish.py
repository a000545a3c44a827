"""`imagematrix publish`: the image index of a version, with all its variants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.options import Json
from imagematrix.cli.output import counted, info, print_json, print_text
from imagematrix.cli.planning import never_pushed
from imagematrix.errors import EngineError, TagMovedError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    from imagematrix.stores.plain_pull import Plain
    from imagematrix.stores.publish import Published

__all__ = ["command"]


def command(
    name: Annotated[str, typer.Argument(metavar="IMAGE:VERSION")],
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="TAG", help="Move this tag, such as latest, to the version."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Read plain_pull from this matrix; default: matrix.yaml, if it exists.",
        ),
    ] = None,
    choose: Annotated[
        list[str] | None,
        typer.Option(metavar="REF", help="Publish this image of a cell that has several; repeatable."),
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Remove images that the registry lost.")] = False,
    json: Json = False,
) -> None:
    """Push images that only the engine has, and write the index of all variants.

    Prints the index with its digest. Variants are only ever added to an index.
    """
    from imagematrix.oci.registry import Registry
    from imagematrix.reference import split
    from imagematrix.stores.publish import publish

    image, version = split(name)
    if version is None or "/" not in image or "@" in name:
        remedy = "such as registry.example.com/ml/training:v1"
        raise UsageError(f"{name} is not an image with a registry and a version", remedy=remedy)
    named = _named(image, version, file)
    chosen = {reference.removeprefix(f"{image}:") for reference in choose or ()}
    _push(image, version, chosen)
    with Registry(image) as registry:
        done = publish(registry, version, alias or (), named=named, chosen=chosen, repair=repair)
    _report(name, done)
    if json:
        print_json(_document(image, version, alias or [], done))
    else:
        print_text(f"{name}@{done.digest}")


def _named(image: str, version: str, file: Path | None) -> dict[str, str]:
    """Return the cells, by platform, that the matrix names for a plain pull of this version."""
    from imagematrix.matrix.expand import expand, plain_pull
    from imagematrix.matrix.load import load

    path = file or Path("matrix.yaml")
    if file is None and not path.exists():
        return {}
    matrix = load(path)
    stated = next((one for one in matrix.images if (one.name, one.version) == (image, version)), None)
    if stated:
        return plain_pull(matrix, expand(matrix), stated)
    if file:
        names = ", ".join(f"{one.name}:{one.version}" for one in matrix.images)
        raise UsageError(f"{path} has no {image}:{version}", remedy=f"it has {names}")
    return {}


def _report(name: str, done: Published) -> None:
    info(f"{name}: {counted(done.variants, 'variant')}, {done.new} new")
    for reference in done.dropped:
        info(f"{reference} removed: the registry lost it")
    for reference in done.stuck:
        info(f"the registry does not allow {reference} to be deleted; until it is, builds treat it as pushed")
    for tag in done.others:
        info(f"{tag} skipped: its cell is published with other inputs")
    for one in done.plain:
        info(_plain_pull(one))


def _plain_pull(one: Plain) -> str:
    """Return a line with what a plain pull gets on a platform, and what that needs beyond the baseline."""
    if one.variant is None:
        return f"{one.platform}: `docker pull` gets nothing: {one.why}"
    needs = ", ".join(filter(None, [one.variant.cuda and f"CUDA {one.variant.cuda} and a GPU", *one.needs]))
    beyond = f"it needs {needs}" if needs else "it runs on every CPU"
    tag = one.variant.reference.rpartition(":")[2]
    return f"{one.platform}: `docker pull` gets {tag} ({one.why}); {beyond}"


def _push(image: str, version: str, chosen: Collection[str]) -> None:
    """Push images that only the engine has; nothing without an engine, as in a pipeline.

    Raises TagMovedError if the registry has a cell with other inputs that was not chosen.
    """
    from imagematrix.audit.cache import Cache, place
    from imagematrix.audit.layers import Layers
    from imagematrix.stores.engine import Engine
    from imagematrix.stores.registry import Remote

    try:
        engine = Engine()
    except EngineError as error:
        info(f"{error}: publishing only what is in the registry")
        return
    with engine, Remote(engine, Layers(Cache(place()))) as remote:
        in_engine = engine.present(image, version)
        in_registry = remote.present(image, version)
        # Once a cell has a final image, its remaining development images do not count.
        final = [one for one in in_engine if not one.development]
        cells = {one.cell for one in (*final, *in_registry) if not one.lost}
        if any(one.cell not in cells for one in in_engine):
            raise never_pushed(image, version)
        pushed = {one.reference for one in in_registry if not one.lost}
        for one in final:
            others = {other.reference for other in in_registry if other.cell == one.cell} - {one.reference}
            if one.reference in pushed or any(f"{image}:{tag}" in others for tag in chosen):
                continue
            if others:
                raise TagMovedError(
                    f"{one.reference} is in the engine, but the registry has {', '.join(sorted(others))}",
                    remedy="raise the version, or pass the tag in the registry to --choose",
                )
            info(f"pushing {one.reference}")
            remote.adopt(one.reference)


def _document(image: str, version: str, aliases: list[str], done: Published) -> dict[str, object]:
    return {
        "schema": "imagematrix.published/v1",
        "image": image,
        "version": version,
        "digest": done.digest,
        "variants": done.variants,
        "new": done.new,
        "aliases": aliases,
        "plain_pull": [one.to_json() for one in done.plain],
        "dropped": list(done.dropped),
        "stuck": list(done.stuck),
        "others": list(done.others),
    }
