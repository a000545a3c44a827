"""Pruning a store: what goes, what stays, and why."""

import datetime as dt

import pytest
from images import tar
from storing import PUBLISHED, from_registry, put, variant

from imagematrix.image_store.fetching import CatalogEntry, FetchOptions, fetch
from imagematrix.stores import prune_store
from imagematrix.stores.retention import Retention

NOW = dt.datetime(2026, 2, 1, tzinfo=dt.UTC)
UNPACKED = FetchOptions(unpacked=True)


@pytest.fixture
def pulled(image_store, server):
    """Call it with a version to pull its image, under the name `image` has; returns its digest."""

    def call(version, image="r:5000/t"):
        made, tag = variant("cpu", tar((version, b"content")), version=version)
        put(server, (made, tag), version=version)
        entry = {"reference": f"{image}:{tag}", "platform": "linux/amd64", "axes": {}, "requirements": {}}
        published = CatalogEntry(
            references=(f"{image}:{tag}",),
            variant=entry,
            catalog={**PUBLISHED.catalog, "image": image, "version": version},
        )
        fetch(image_store, from_registry(server), made.digest, published, UNPACKED)
        return made.digest

    return call


def reasons(store, **more):
    shown = prune_store.survey(store, Retention(keep=1), now=NOW, **more)
    return {f"{one.images[0]}:{one.version}": one.reasons for one in shown.images}


def test_what_another_user_owns_stays(image_store, pulled, monkeypatch):
    digests = {version: pulled(version) for version in ("v1", "v2", "v3")}
    owners = {digests["v1"]: "alice"}
    monkeypatch.setattr(prune_store, "other_owner", lambda _, digest: owners.get(digest))
    assert reasons(image_store) == {
        "r:5000/t:v1": "files of alice",
        "r:5000/t:v2": "",
        "r:5000/t:v3": "newest",
    }
