"""Pruning a store in a folder: which of its images no node needs any longer, and their removal."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain

from imagematrix.build.retire.prune import PruneCandidate, Pruning, decide_retention
from imagematrix.common.image_reference import shorten_name, split_version
from imagematrix.common.suggestions import suggest_nearest
from imagematrix.common.text import quote_word
from imagematrix.errors import EngineError, UnknownImageError
from imagematrix.images.catalog.catalog import Catalog, Variant
from imagematrix.images.local_store.eviction import find_other_owner, remove_stored_image

TYPE_CHECKING = False
if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Collection, Mapping, Sequence

    from imagematrix.build.retire.retention import Retention
    from imagematrix.images.local_store.folder import ImageStore, StoredImage, StoredName


def survey_store(
    store: ImageStore,
    retention: Retention,
    *,
    only: Collection[str] = (),
    newer_s: int | None = None,
    now: dt.datetime,
) -> Pruning:
    """Return which images of a store are to be removed.

    An image stays if `retention` keeps the version of one of its names, if a container of any node runs from
    it, if it was pulled less than `newer_s` seconds ago, or if another user owns files of it that this one
    cannot remove. `only` are the names of the images to consider; by default all are. An image with another
    name besides stays. Images that are damaged are no longer in use, and a pull replaces them.

    Raises UnknownImageError if the store has none of the images in `only`, UsageError if it cannot be read.
    """
    stored = {image.digest: image for image in store.list_intact_images()}
    every = [_make_candidate(image, image.names) for image in stored.values()]
    found = [one for one in every if not only or not {*only}.isdisjoint(one.images)]
    for name in only:
        if not any(name in one.images for one in found):
            names = sorted({name for one in every for name in one.images})
            remedy = suggest_nearest(name, names) or (f"it has {', '.join(names)}" if names else None)
            raise UnknownImageError(f"{store} has no variant of {name}", remedy=remedy)
    with store.convert_errors():
        users = store.find_leases()
    # Each name has the fate of its own version.
    judged = {
        one.id: [
            _make_candidate(stored[one.id], [name])
            for name in stored[one.id].names
            if not only or shorten_name(name.image) in only
        ]
        for one in found
    }
    fates, unserved = decide_retention(
        chain.from_iterable(judged.values()), retention, partial(_catalog, stored)
    )
    result = []
    for one in found:
        own = [fates[part.images[0], part.version] for part in judged[one.id]]
        hosts = tuple(sorted({host for fate in own for host in fate.hosts}))
        considered = {name for part in judged[one.id] for name in part.names}
        why = [
            *dict.fromkeys(reason for fate in own for reason in fate.reasons),
            *[f"also named {name}" for name in one.names if name not in considered][:1],
        ]
        if user := users.get(one.id):
            why.append(str(user))
        if newer_s is not None and now.timestamp() - store.get_pull_time(one.id) < newer_s:
            why.append("younger")
        if not why and not hosts and (owner := find_other_owner(store, one.id)):
            why.append(f"files of {owner}")
        result.append(replace(one, why=tuple(why), hosts=hosts))
    result.sort(key=lambda one: (one.images, one.tag, one.id))
    return Pruning(images=tuple(result), unserved=unserved)


def remove_image(store: ImageStore, image: PruneCandidate) -> None:
    """Remove an image from a store, and the catalog of its version if it was the last one of that.

    Raises EngineError if a container has started from it meanwhile, UsageError if the folder refuses, or its
    disk is full and the reserve for this is spent.
    """
    stored = store.find(image.id)
    if stored is None:
        return
    remedy = (
        f"free a few kB there, such as with `rm -rf {quote_word(f'{store}/partial')}`, and run this again"
    )
    with store.convert_errors(full=remedy):
        if not remove_stored_image(store, image.id):
            raise EngineError(f"{image.names[0]} is in use now", remedy="run this again")
        left = {(name.image, name.version) for other in store.list_intact_images() for name in other.names}
        for name in stored.names:
            if (name.image, name.version) not in left:
                store.drop_catalog(name.image, name.version)


def _make_candidate(image: StoredImage, names: Sequence[StoredName]) -> PruneCandidate:
    """Return an image with some of its names, which has the version and the tag of the first one."""
    first = names[0]
    return PruneCandidate(
        id=image.digest,
        images=tuple(dict.fromkeys(shorten_name(name.image) for name in names)),
        version=first.version,
        tag=str(split_version(first.references[0])[1]),
        names=tuple(dict.fromkeys(reference for name in names for reference in name.references)),
        others=(),
        size=image.size,
    )


def _catalog(
    stored: Mapping[str, StoredImage], name: str, version: str, held: list[PruneCandidate]
) -> Catalog:
    variants = [
        Variant.from_json(own.variant, own.references[0])
        for one in held
        for own in stored[one.id].names
        if (shorten_name(own.image), own.version) == (name, version)
    ]
    return Catalog(image=name, version=version, variants=tuple(variants))
