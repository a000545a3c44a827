"""What `select`, `explain` and `run` share: the host and the catalog that their options name."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from imagematrix.catalog.catalog import Catalog
    from imagematrix.node.host import Host

__all__ = ["catalog_of", "node_of"]


def node_of(
    file: Path | None, root: Path | None, nvidia_smi: Path | None, gpus: str | None
) -> tuple[Host, str | None]:
    """Return the host, and which of its GPUs are wanted: `gpus`, or else what the environment names.

    The host is the one saved in `file`, or this one (or the captured tree `root`) as it is probed now. What
    the environment says is about this machine and no other. Where it names GPUs, the host has no others.
    """
    host = _host_of(file, root, nvidia_smi)
    if any(given is not None for given in (file, root, nvidia_smi)):
        return host, gpus
    from imagematrix.gpus.visible import within

    return within(host, gpus)


def _host_of(file: Path | None, root: Path | None, nvidia_smi: Path | None) -> Host:
    if file is not None:
        from imagematrix.node.host import Host

        return Host.load(file)
    from imagematrix.node.probe import probe

    return probe(root or "/", smi=nvidia_smi)


def catalog_of(image: str, catalog: str | None) -> Catalog:
    """Return the catalog of `image` from what `catalog` names, or from where the image lives.

    An image whose name has a registry lives there, any other in the engine. `catalog` is a file, or else a
    reference in a registry. Raises UnknownImageError where it is about another image or version.
    """
    from imagematrix.catalog.catalog import Catalog

    if catalog is None:
        return _where_it_lives(image)
    if not os.path.exists(catalog) and not catalog.endswith(".json"):  # noqa: PTH110 - pathlib is slow to load
        return Catalog.from_registry(catalog)
    whole = Catalog.load(catalog)
    found = whole.named(image)
    if found is None:
        from imagematrix.errors import UnknownImageError
        from imagematrix.spelling import SLIP, nearest

        name = f"{whole.image}:{whole.version}"
        remedy = nearest(
            image, [name, whole.image, *(one.reference for one in whole.variants)], likeness=SLIP
        )
        raise UnknownImageError(f"{catalog} is the catalog of {name}, not of {image}", remedy=remedy)
    return found


def _where_it_lives(image: str) -> Catalog:
    """Return the catalog of the registry that an image's name has, or of the engine.

    What was built and not published yet is in the engine only. A registry that can't be reached is an error:
    the engine may have no more than what this node pulled, and another choice would come of that.
    """
    from imagematrix.catalog.catalog import Catalog
    from imagematrix.errors import EngineError, UnknownImageError
    from imagematrix.reference import names_registry

    if not names_registry(image):
        return Catalog.from_engine(image)
    try:
        return Catalog.from_registry(image)
    except UnknownImageError as error:
        unknown = error
    try:
        found = Catalog.from_engine(image)
    except (EngineError, UnknownImageError):
        raise unknown from None
    from imagematrix.cli.output import say

    say(f"imagematrix: {unknown}: choosing from the engine's images")
    return found
