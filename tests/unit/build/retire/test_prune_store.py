"""Pruning a store: what goes, what stays, and why."""

import datetime as dt
from functools import partial

import pytest
from images import tar
from storing import PUBLISHED, from_registry, put, variant

from imagematrix.build.retire import prune_store
from imagematrix.build.retire.prune import apply_pruning
from imagematrix.build.retire.retention import Retention
from imagematrix.hardware.host.host import Host
from imagematrix.images.local_store.image_fetch import CatalogEntry, FetchOptions, fetch_image

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
        fetch_image(image_store, from_registry(server), made.digest, published, UNPACKED)
        return made.digest

    return call


def reasons(store, **more):
    shown = prune_store.survey_store(store, Retention(keep=1), now=NOW, **more)
    return {f"{one.images[0]}:{one.version}": one.reasons for one in shown.images}


def test_what_another_user_owns_stays(image_store, pulled, monkeypatch):
    digests = {version: pulled(version) for version in ("v1", "v2", "v3")}
    owners = {digests["v1"]: "alice"}
    monkeypatch.setattr(prune_store, "find_other_owner", lambda _, digest: owners.get(digest))
    assert reasons(image_store) == {
        "r:5000/t:v1": "files of alice",
        "r:5000/t:v2": "",
        "r:5000/t:v3": "newest",
    }


def prune(store, **more):
    look = partial(prune_store.survey_store, store, Retention(keep=1), now=NOW, **more)
    shown = look()
    apply_pruning(shown, look, lambda _: None, partial(prune_store.remove_image, store))


def test_an_image_stays_while_one_of_its_names_needs_it(image_store, pulled):
    old = pulled("v1")
    assert pulled("v1", "mirror:5000/t") == old
    pulled("v2")
    assert reasons(image_store) == {"r:5000/t:v1": "newest", "r:5000/t:v2": "newest"}
    (shown,) = [
        one
        for one in prune_store.survey_store(image_store, Retention(keep=1), now=NOW).images
        if one.id == old
    ]
    assert shown.images == ("r:5000/t", "mirror:5000/t")
    prune(image_store)
    assert old in image_store.list_digests()
    pulled("v2", "mirror:5000/t")
    assert reasons(image_store)["r:5000/t:v1"] == ""
    prune(image_store)
    assert old not in image_store.list_digests()
    assert (
        image_store.load_catalog("mirror:5000/t", "v1") is image_store.load_catalog("r:5000/t", "v1") is None
    )
    assert image_store.load_catalog("mirror:5000/t", "v2")


def test_an_image_stays_if_it_has_a_name_that_is_not_considered(image_store, pulled):
    for version in ("v1", "v2"):
        pulled(version)
        pulled(version, "mirror:5000/t")
    assert reasons(image_store)["r:5000/t:v1"] == ""
    assert reasons(image_store, only=["r:5000/t"])["r:5000/t:v1"].startswith("also named mirror:5000/t:v1-")
    assert reasons(image_store, only=["r:5000/t", "mirror:5000/t"])["r:5000/t:v1"] == ""


def test_a_version_is_kept_for_the_hosts_of_each_name(image_store, pulled, profiles):
    pulled("v1")
    pulled("v1", "mirror:5000/t")
    kept = Retention(keep=0, hosts={"node": Host.load(profiles["laptop"])})
    (one,) = prune_store.survey_store(image_store, kept, now=NOW).images
    assert one.hosts == ("node",)
