"""The catalogs in a store of images: of the versions that something was pulled of, as they were then."""

from __future__ import annotations

from imagematrix.catalog.catalog import SCHEMA, Catalog
from imagematrix.errors import UnknownImageError
from imagematrix.reference import names_registry, split
from imagematrix.spelling import SLIP, nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    from imagematrix.image_store.folder import ImageStore

__all__ = ["UNNAMED", "stored"]

UNNAMED = "name it with its registry, or let the site's file name the registry"


def stored(name: str, store: ImageStore) -> Catalog:
    """Return the catalog of `name` (IMAGE:VERSION, or IMAGE if it has one version) in a store.

    It has one variant if `name` is a variant's reference or digest. It lists all variants of the version,
    also those that are not in the store; of a version of which only named variants were pulled, these.

    Raises UnknownImageError if the store has no such catalog, UsageError if one cannot be read.
    """
    image, version = split(name)
    exact = store.catalog(image, version) if version else None
    if exact is not None:
        return Catalog.from_json(exact, f"{store}: {name}")
    catalogs = [Catalog.from_json(found, f"{store}: {image}") for found in store.catalogs(image)]
    catalogs += _of_images(store, image, {catalog.version for catalog in catalogs})
    named = [part for catalog in catalogs if (part := catalog.named(name))]
    if len(named) == 1:
        return named[0]
    versions = [f"{image}:{catalog.version}" for catalog in named or catalogs]
    if named:
        message = f"{image} has several versions in the store {store}"
        raise UnknownImageError(message, remedy=f"name one of {', '.join(versions)}")
    remedy = nearest(name, versions, likeness=SLIP) or (f"it has {', '.join(versions)}" if versions else None)
    raise UnknownImageError(
        f"the store {store} has no variant of {name}",
        remedy=remedy
        or (f"run `imagematrix pull {name} --to {store}`" if names_registry(image) else UNNAMED),
    )


def _of_images(store: ImageStore, image: str, known: Collection[str]) -> list[Catalog]:
    """Return the catalogs of the versions that are not `known`, with the images that the store has."""
    found: dict[str, dict[str, Any]] = {}
    for stored_image in store.whole():
        version = stored_image.version
        if stored_image.image == image and version not in known:
            document = {"schema": SCHEMA, "image": image, "version": version, **stored_image.terms}
            found.setdefault(version, document | {"variants": []})["variants"].append(stored_image.variant)
    return [Catalog.from_json(document, f"{store}: {image}") for document in found.values()]
