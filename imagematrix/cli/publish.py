"""`imagematrix publish`: the image index of a version, with all its variants."""

from __future__ import annotations

from typing import Annotated

import typer

from imagematrix.cli.options import Json
from imagematrix.cli.output import answer, counted, say
from imagematrix.cli.planning import never_pushed
from imagematrix.errors import EngineError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.build.publish import Published

__all__ = ["command"]


def command(
    name: Annotated[str, typer.Argument(metavar="IMAGE:VERSION")],
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="TAG", help="Let this tag stand for the version, such as latest."),
    ] = None,
    json: Json = False,
) -> None:
    """Push what the engine has and the registry lacks, and write the index of all variants.

    Prints the index by its digest. What an index had stays in it: variants are only ever added.
    """
    from imagematrix.build.publish import publish
    from imagematrix.catalog.catalog import split
    from imagematrix.registry import Registry

    image, version = split(name)
    if version is None or "/" not in image:
        remedy = "such as registry.example.com/ml/training:v1"
        raise UsageError(f"{name} is no image with a registry and a version", remedy=remedy)
    _push(image, version)
    with Registry(image) as registry:
        done = publish(registry, version, alias or ())
    say(f"{name}: {counted(done.variants, 'variant')}, {done.new} new")
    if json:
        answer(_document(image, version, alias or [], done))
    else:
        print(f"{name}@{done.digest}")


def _push(image: str, version: str) -> None:
    """Push what the engine has and the registry lacks; without an engine, as in a pipeline, nothing."""
    from imagematrix.build.local import Engine
    from imagematrix.build.remote import Remote

    try:
        engine = Engine()
    except EngineError as error:
        say(f"{error}: only what is in the registry is published")
        return
    with engine, Remote(engine) as remote:
        here = engine.present(image, version)
        if any(one.development for one in here):
            raise never_pushed(image, version)
        there = {one.reference for one in remote.present(image, version)}
        for one in here:
            if one.reference not in there:
                say(f"pushing {one.reference}")
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
    }
