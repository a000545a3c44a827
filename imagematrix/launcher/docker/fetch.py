"""Bringing the image of a Selection into a store, which needs no engine."""

from __future__ import annotations

import contextlib

from imagematrix.common.image_reference import is_saved, names_registry, split_version
from imagematrix.errors import UsageError
from imagematrix.images.catalog.sources import require_signed
from imagematrix.images.local_store.image_fetch import DEFAULT, NOBODY, CatalogEntry, fetch_image

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

    from imagematrix.images.local_store.folder import ImageStore, StoredImage
    from imagematrix.images.local_store.image_fetch import FetchOptions, FetchWatcher
    from imagematrix.images.local_store.origins import ImageOrigin
    from imagematrix.selection.selection import Selection

REMEDY = "name it with its registry, or pass --catalog oci:FOLDER or --catalog FILE.tar"


def require_source(image: str, catalog: str | None) -> None:
    """Raise UsageError if neither an image's name nor the catalog says where it is, without an engine."""
    if catalog is None and not names_registry(image):
        raise UsageError(f"{image} names no registry, and a store is filled without an engine", remedy=REMEDY)


def fetch_selected(
    selection: Selection,
    store: ImageStore,
    *,
    catalog: str | None = None,
    part: bool = False,
    policy: str | PathLike[str] | None = None,
    how: FetchOptions = DEFAULT,
    watcher: FetchWatcher = NOBODY,
) -> StoredImage:
    """Return the image to start for `selection` in a store, fetched unless it is there.

    It comes from the layout or the archive `catalog` if the selection is from one, else from the registry in
    its name. `part`: the selection is from a part of a catalog, such as one variant. Signatures are checked
    first, as the site's policy and the user's require: the file `policy`, or else the one that the
    environment names.

    Raises what `images.local_store.image_fetch.fetch_image` does, and SignatureError if a signature is
    missing or wrong.
    """
    variant = selection.variant
    if variant is None:
        raise UsageError("cannot fetch: nothing was selected")
    signed = require_signed(variant, policy, version=selection.version)
    name, _, exact = variant.reference.partition("@")
    digest = signed or exact or variant.digest
    if selection.warm:
        name, digest = selection.warm.reference, selection.warm.digest
    if digest is None:
        message = f"{variant.reference} has no digest in its catalog, so it cannot be fetched"
        raise UsageError(message, remedy="use the catalog of its registry")
    saved = catalog if catalog is not None and is_saved(catalog) else None
    if saved is None:
        require_source(name, None)

    @contextlib.contextmanager
    def open_origin() -> Iterator[ImageOrigin]:
        if saved is not None:
            from imagematrix.images.catalog.saved_images import open_source

            yield open_source(saved)
            return
        from imagematrix.images.local_store.origins import RegistryOrigin
        from imagematrix.images.oci.registry import Registry

        with Registry(split_version(name)[0]) as registry:
            yield RegistryOrigin(registry)

    entry = CatalogEntry(
        references=(name,),
        variant=variant.to_json(),
        catalog=selection.decision.catalog.to_json(),
        part=part,
    )
    return fetch_image(store, open_origin, digest, entry, how, watcher)
