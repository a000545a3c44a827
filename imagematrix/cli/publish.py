"""`imagematrix publish`: the image index of a version, with all its variants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.options import Json
from imagematrix.cli.output import counted, info, print_json, print_text
from imagematrix.cli.planning import never_pushed
from imagematrix.engine.releases import ZSTD_LAYERS
from imagematrix.errors import EngineError, TagMovedError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

    from imagematrix.stores.plain_pull import PlatformDefault
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
            help="Read plain_pull and versions from this matrix; default: matrix.yaml, if it exists.",
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
    named, versions = _of_matrix(image, version, file)
    # --choose takes a reference, or only its tag.
    chosen = {reference.removeprefix(f"{image}:") for reference in choose or ()}
    _push(image, version, chosen)
    with Registry(image) as registry:
        done = publish(
            registry,
            version,
            alias or (),
            named=named,
            versions=versions,
            chosen=chosen,
            repair=repair,
        )
    _report(name, done)
    if json:
        print_json(_document(image, version, alias or [], done))
    else:
        print_text(f"{name}@{done.digest}")


def _of_matrix(image: str, version: str, file: Path | None) -> tuple[dict[str, str], frozenset[str]]:
    """Return the cells, by platform, that the matrix names for a plain pull, and the image's versions."""
    from imagematrix.matrix.expand import expand, plain_pull
    from imagematrix.matrix.load import load

    path = file or Path("matrix.yaml")
    if file is None and not path.exists():
        return {}, frozenset()
    matrix = load(path, contexts=None)
    declared = {each.version: each for each in matrix.images if each.name == image}
    versions = frozenset(declared)
    if version in declared:
        return plain_pull(matrix, expand(matrix), declared[version]), versions
    if file:
        names = ", ".join(f"{each.name}:{each.version}" for each in matrix.images)
        raise UsageError(f"{path} has no {image}:{version}", remedy=f"it has {names}")
    return {}, versions


def _report(name: str, done: Published) -> None:
    info(f"{name}: {counted(done.variants, 'variant')}, {done.new} new")
    for reference in done.dropped:
        info(f"{reference} removed: the registry lost it")
    for reference in done.stuck:
        info(f"the registry does not allow {reference} to be deleted; until it is, builds treat it as pushed")
    for tag in done.others:
        info(f"{tag} skipped: its cell is published with other inputs")
    for plain in done.plain:
        info(_plain_pull(plain))


def _plain_pull(plain: PlatformDefault) -> str:
    """Return a line with what a plain pull gets on a platform, and what that needs beyond the baseline."""
    if plain.variant is None:
        return f"{plain.platform}: `docker pull` gets nothing: {plain.why}"
    gpu = plain.variant.cuda and f"CUDA {plain.variant.cuda} and a GPU"
    engine = f"{ZSTD_LAYERS} or newer, or another engine that unpacks zstd" if plain.zstd else None
    needs = ", ".join(filter(None, [gpu, *plain.needs, engine]))
    beyond = f"it needs {needs}" if needs else "it runs on every CPU"
    tag = plain.variant.reference.rpartition(":")[2]
    return f"{plain.platform}: `docker pull` gets {tag} ({plain.why}); {beyond}"


def _push(image: str, version: str, chosen: Collection[str]) -> None:
    """Push images that only the engine has; nothing without an engine, as in a pipeline.

    Raises TagMovedError if the registry has a cell with other inputs that was not chosen.
    """
    from imagematrix.audit.cache import Cache
    from imagematrix.audit.layers import Layers
    from imagematrix.files import cache_folder
    from imagematrix.stores.engine import EngineStore
    from imagematrix.stores.registry import RegistryStore

    try:
        engine = EngineStore()
    except EngineError as error:
        info(f"{error}: publishing only what is in the registry")
        return
    with engine, RegistryStore(engine, Layers(Cache(cache_folder("layers")))) as remote:
        in_engine = engine.present(image, version)
        in_registry = remote.present(image, version)
        # Once a cell has a final image, its remaining development images do not count.
        final = [present for present in in_engine if not present.development]
        cells = {present.cell for present in (*final, *in_registry) if not present.lost}
        if any(present.cell not in cells for present in in_engine):
            raise never_pushed(image, version)
        pushed = {present.reference for present in in_registry if not present.lost}
        for present in final:
            others = {other.reference for other in in_registry if other.cell == present.cell}
            others.discard(present.reference)
            if present.reference in pushed or any(f"{image}:{tag}" in others for tag in chosen):
                continue
            if others:
                raise TagMovedError(
                    f"{present.reference} is in the engine, but the registry has {', '.join(sorted(others))}",
                    remedy="raise the version, or pass the tag in the registry to --choose",
                )
            info(f"pushing {present.reference}")
            remote.adopt(present.reference)


def _document(image: str, version: str, aliases: list[str], done: Published) -> dict[str, object]:
    return {
        "schema": "imagematrix.published/v1",
        "image": image,
        "version": version,
        "digest": done.digest,
        "variants": done.variants,
        "new": done.new,
        "aliases": aliases,
        "plain_pull": [plain.to_json() for plain in done.plain],
        "dropped": list(done.dropped),
        "stuck": list(done.stuck),
        "others": list(done.others),
    }
