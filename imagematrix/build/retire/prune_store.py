"""Pruning a store in a folder: which of its images no node needs any longer, and their removal."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain

from imagematrix.build.retire.prune import (
    PruneCandidate,
    Pruning,
    decide_retention,
    select_candidates,
    sort_candidates,
)
from imagematrix.common.image_reference import shorten_name, split_version
from imagematrix.common.text import quote_word
from imagematrix.errors import EngineError
from imagematrix.images.catalog.catalog import Catalog, Variant
from imagematrix.images.local_store.eviction import find_other_owner, remove_stored_image
from imagematrix.images.local_store.stored_layers import StoredLayers

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
    candidates = select_candidates(
        [_make_candidate(image, image.names) for image in stored.values()], only, str(store)
    )
    with store.convert_errors():
        users = store.find_leases()
    # Each name has the decision about its own version.
    by_name = {
        candidate.id: [
            _make_candidate(stored[candidate.id], [name])
            for name in stored[candidate.id].names
            if not only or shorten_name(name.image) in only
        ]
        for candidate in candidates
    }
    decisions, unserved = decide_retention(
        chain.from_iterable(by_name.values()), retention, partial(_make_catalog, stored)
    )
    judged = []
    for candidate in candidates:
        parts = by_name[candidate.id]
        of_versions = [decisions[part.images[0], part.version] for part in parts]
        hosts = tuple(sorted({host for decision in of_versions for host in decision.hosts}))
        considered = {name for part in parts for name in part.names}
        why = [
            *dict.fromkeys(reason for decision in of_versions for reason in decision.reasons),
            *[f"also named {name}" for name in candidate.names if name not in considered][:1],
        ]
        if user := users.get(candidate.id):
            why.append(str(user))
        if newer_s is not None and now.timestamp() - store.get_pull_time(candidate.id) < newer_s:
            why.append("younger")
        if not why and not hosts and (owner := find_other_owner(store, candidate.id)):
            why.append(f"files of {owner}")
        judged.append(replace(candidate, why=tuple(why), hosts=hosts))
    return Pruning(images=sort_candidates(judged), unserved=unserved)


def remove_image(store: ImageStore, image: PruneCandidate) -> None:
    """Remove an image from a store, with layers and the catalog of its version if no other image has them.

    Raises EngineError if a container has started from it meanwhile, UsageError if the folder refuses, or its
    disk is full and the reserve for this is spent.
    """
    stored = store.find(image.id)
    if stored is None:
        return
    remedy = (
        f"free a few kB there, such as with `rm -rf {quote_word(f'{store}/layers')} "
        f"{quote_word(f'{store}/partial')}`, and run this again"
    )
    with store.convert_errors(full=remedy):
        if not remove_stored_image(store, image.id):
            raise EngineError(f"{image.names[0]} is in use now", remedy="run this again")
        StoredLayers(store).remove_unused()
        remaining = {
            (name.image, name.version) for image in store.list_intact_images() for name in image.names
        }
        for name in stored.names:
            if (name.image, name.version) not in remaining:
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


def _make_catalog(
    stored: Mapping[str, StoredImage], name: str, version: str, candidates: list[PruneCandidate]
) -> Catalog:
    variants = [
        Variant.from_json(stored_name.variant, stored_name.references[0])
        for candidate in candidates
        for stored_name in stored[candidate.id].names
        if (shorten_name(stored_name.image), stored_name.version) == (name, version)
    ]
    return Catalog(image=name, version=version, variants=tuple(variants))
