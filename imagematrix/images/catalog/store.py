"""The catalogs in a store of images: of the versions that something was pulled of, as they were then."""

from __future__ import annotations

from imagematrix.common.image_reference import names_registry, split_version
from imagematrix.common.suggestions import SLIP, suggest_nearest
from imagematrix.common.text import quote_word
from imagematrix.errors import UnknownImageError
from imagematrix.images.catalog.catalog import SCHEMA, Catalog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    from imagematrix.images.local_store.folder import ImageStore

UNNAMED = "name it with its registry, or let the site's file name the registry"


def open_stored(name: str, store: ImageStore) -> Catalog:
    """Return the catalog of `name` (IMAGE:VERSION, or IMAGE if it has one version) in a store.

    It has one variant if `name` is a variant's reference or digest. It lists all variants of the version,
    also those that are not in the store; of a version of which only named variants were pulled, these.

    Raises UnknownImageError if the store has no such catalog, UsageError if one cannot be read.
    """
    image, version = split_version(name)
    exact = store.load_catalog(image, version) if version else None
    if exact is not None:
        return Catalog.from_json(exact, f"{store}: {name}")
    catalogs = [Catalog.from_json(document, f"{store}: {image}") for document in store.load_catalogs(image)]
    catalogs += _list_image_catalogs(store, image, {catalog.version for catalog in catalogs})
    named = [part for catalog in catalogs if (part := catalog.named(name))]
    if len(named) == 1:
        return named[0]
    versions = [f"{image}:{catalog.version}" for catalog in named or catalogs]
    if named:
        message = f"{image} has several versions in the store {store}"
        raise UnknownImageError(message, remedy=f"name one of {', '.join(versions)}")
    remedy = suggest_nearest(name, versions, likeness=SLIP) or (
        f"it has {', '.join(versions)}" if versions else None
    )
    raise UnknownImageError(
        f"the store {store} has no variant of {name}",
        remedy=remedy
        or (
            f"run `imagematrix pull {quote_word(name)} --to {quote_word(store)}`"
            if names_registry(image)
            else UNNAMED
        ),
    )


def list_present(store: ImageStore, name: str | None = None) -> list[Catalog]:
    """Return the catalogs of the variants that a store has, of all images or of `name` (IMAGE[:VERSION]).

    Damaged images are left out. Raises UnknownImageError if it has nothing of `name`, UsageError if it cannot
    be read.
    """
    image, version = split_version(name) if name else (None, None)
    catalogs = [
        catalog for catalog in _list_image_catalogs(store, image) if version in (None, catalog.version)
    ]
    if name and not catalogs:
        raise UnknownImageError(
            f"the store {store} has no variant of {name}",
            remedy=f"run `imagematrix ls --store {quote_word(store)}`",
        )
    return catalogs


def _list_image_catalogs(store: ImageStore, image: str | None, known: Collection[str] = ()) -> list[Catalog]:
    """Return the catalogs of an image's or all versions that are not `known`, with what the store has."""
    documents: dict[tuple[str, str], dict[str, Any]] = {}
    for name in (name for stored_image in store.list_intact_images() for name in stored_image.names):
        if image in (None, name.image) and name.version not in known:
            new = {
                "schema": SCHEMA,
                "image": name.image,
                "version": name.version,
                **name.terms,
                "variants": [],
            }
            document = documents.setdefault((name.image, name.version), new)
            # A variant is there once, though the store may have it and a warm image of it.
            if name.variant not in document["variants"]:
                document["variants"].append(name.variant)
    return [Catalog.from_json(documents[key], f"{store}: {key[0]}") for key in sorted(documents)]
